"""The command about what a trainer has published: ``cowrec versions``."""

import time
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def versions(
    target: Annotated[str, typer.Argument(help="Publication: folder, s3://BUCKET/FOLDER or redis://HOST:PORT.")],
    republish: Annotated[
        int | None, typer.Option(help="Version to publish again as the newest, while no trainer publishes there.")
    ] = None,
) -> None:
    """Lists what a trainer has published. --republish N makes all servers that follow it go back to version N.

    Version N becomes the newest one under a new number. A trainer that is started again later publishes after it.

    Example: `cowrec versions published --republish 1042`
    """
    from cowrec.trainer.publishing import versions as published

    if republish is not None:
        number = published.republish(target, republish)
        print(f"version {republish} is published again as version {number}, to which all servers go")
        return
    from cowrec.trainer.reports.text_table import aligned

    listed = published.list_versions(target)
    reachable = published.reachable(listed)
    rows = [["version", "kind", "step", "newest sample", "published", "bytes", "lineage", "state"]]
    for each in listed:
        state = "cannot be read" if each.problem else "" if each.version in reachable else "not reachable"
        about, lineage = ["", "", ""], ""
        if each.blob:
            change, lineage = each.blob.change, each.blob.lineage
            about = [str(change.step), _date(change.sample_time), _date(each.blob.created)]
        rows.append([str(each.version), each.kind, *about, f"{each.size:,}", lineage[:8], state])
    print(aligned(rows))
    for each in listed:
        if each.problem:
            print(f"version {each.version}: {each.problem}")


def _date(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
