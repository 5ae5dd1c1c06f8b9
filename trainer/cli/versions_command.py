"""The command about what a trainer has published: ``cowrec versions``."""

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cowrec.trainer.publishing.version_list import Versions

app = typer.Typer()


@app.command()
def versions(
    target: Annotated[str, typer.Argument(help="Publication: folder, s3://BUCKET/FOLDER or redis://HOST:PORT.")],
    pin: Annotated[int | None, typer.Option(help="Version that all servers go to, and stay at until --unpin.")] = None,
    unpin: Annotated[bool, typer.Option("--unpin", help="Lets servers go to the newest version again.")] = False,
) -> None:
    """Lists what a trainer has published. --pin N makes all servers that follow it go back to version N.

    Training and publishing go on meanwhile. Servers started with --ignore-pin keep following the newest version.

    Example: `cowrec versions published --pin 1042`
    """
    from cowrec.trainer.publishing.version_list import Versions

    if pin is not None and unpin:
        raise ValueError("--pin and --unpin exclude each other")
    with closing(Versions(target)) as found:
        if unpin:
            found.release_pin()
            print("released: servers go to the newest version")
        elif pin is not None:
            found.set_pin(pin)
            print(f"pinned: servers go to version {pin} and stay there until --unpin")
        else:
            _print_table(found)


def _print_table(found: "Versions") -> None:
    from cowrec.trainer.reports.text_table import aligned

    listed, pin = found.listed(), found.pin()
    rows = [["version", "kind", "step", "newest sample", "published", "bytes", "lineage", "state"]]
    for each in listed:
        state = "cannot be read" if each.problem else ""
        if pin and each.version == pin.version:
            state = f"{state} pinned".strip()
        about = ["", "", ""] if each.problem else [str(each.step), _date(each.sample_time), _date(each.created)]
        if not (each.pinnable or each.problem):
            state = f"{state} not reachable".strip()
        rows.append([str(each.version), each.kind, *about, f"{each.size:,}", each.lineage[:8], state])
    print(aligned(rows))
    for each in listed:
        if each.problem:
            print(f"version {each.version}: {each.problem}")
    if pin:
        print(f"pinned to version {pin.version} since {_date(pin.created)}")


def _date(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
