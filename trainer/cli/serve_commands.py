"""The commands of serving: ``cowrec serve | shadow``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cowrec.trainer.runtime.service_log import LogSettings, open_log

from .flag_values import KeyFile, count_flag, key_of, parse_local
from .run_flags import LogBackups, LogFile, LogForm, LogFormName, LogMaxBytes

if TYPE_CHECKING:
    from cowrec.trainer.serving.shadow.config import ShadowConfig
    from cowrec.trainer.signing import SigningKey

app = typer.Typer()

Follow = Annotated[
    str | None, typer.Option(help="Publication whose new versions to apply: folder, or redis://HOST:PORT.")
]
MaxAge = Annotated[
    float | None,
    typer.Option(help="Seconds since a version was published, after which /readyz is 503. [any]"),
]
IgnorePin = Annotated[
    bool,
    typer.Option(
        "--ignore-pin", help="Follow the newest version where others stay at the one of cowrec versions --pin."
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")]
HealthPort = Annotated[
    int | None,
    typer.Option(help="Port on which a thread of its own answers /livez, /readyz, /health, /metrics. [none]"),
]
ClientConnections = Annotated[
    int, count_flag("Most open connections from one address; a proxy in front is one address.")
]
TimeoutMs = Annotated[
    float, typer.Option(help="Time from a request's arrival to its prediction; a request may ask for less.")
]
ShadowExport = Annotated[
    str | None,
    typer.Option(help="Exported model that predicts the same requests, after their answers, to be compared."),
]
ShadowFollow = Annotated[str | None, typer.Option(help="Publication that the shadow follows, whatever is pinned.")]
ShadowShare = Annotated[float, typer.Option(help="Share of the requests that the shadow predicts.")]
ShadowLog = Annotated[
    Path | None, typer.Option(parser=parse_local, help="File for both predictions of each sample, as JSON lines.")
]
ShadowLogBytes = Annotated[int, count_flag("Most bytes of that file and the one before, FILE.1.")]


@app.command()
def serve(
    export_dir: Annotated[str, typer.Argument(help="Folder of an exported model: a path or s3://BUCKET/EXPORT.")],
    follow: Follow = None,
    max_age: MaxAge = None,
    ignore_pin: IgnorePin = False,
    key_file: KeyFile = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    health_port: HealthPort = None,
    max_request_bytes: Annotated[int, count_flag("Largest body of a request.")] = 1 << 20,
    max_samples: Annotated[int, count_flag("Most samples in a request.")] = 1000,
    max_concurrent: Annotated[int, count_flag("Most concurrent requests; further ones are refused.")] = 256,
    max_connections: Annotated[int, count_flag("Most open connections.")] = 512,
    max_client_connections: ClientConnections = 256,
    request_seconds: Annotated[float, typer.Option(help="Time for a request to arrive.")] = 10.0,
    timeout_ms: TimeoutMs = 1000.0,
    log_format: LogForm = LogFormName.text,
    log_file: LogFile = None,
    log_max_bytes: LogMaxBytes = LogSettings.max_bytes,
    log_backups: LogBackups = LogSettings.backups,
    shadow: ShadowExport = None,
    shadow_follow: ShadowFollow = None,
    shadow_share: ShadowShare = 1.0,
    shadow_log: ShadowLog = None,
    shadow_log_bytes: ShadowLogBytes = 1 << 30,
    workers: Annotated[int, count_flag("Processes that answer; the limits are those of each.")] = 1,
) -> None:
    """Serves predictions over HTTP: POST /predict, GET /health, /livez, /readyz, /metrics (Prometheus).

    A sample is a JSON object of the raw columns; a request is one sample, a list of samples, or
    `{"shared": {...}, "samples": [...]}` for samples that share fields.

    Example: `cowrec serve exports/criteo --follow published`

    Example: `curl localhost:8000/predict --data '{"I1": 3, "C1": "68fd1e64", ...}'`
    """
    from cowrec.trainer.runs.remote_run import local_copy

    run = _server()
    from cowrec.trainer.serving.limits import Limits

    open_log(LogSettings(log_format.value, log_file, log_max_bytes, log_backups), "%(asctime)s cowrec: %(message)s")
    connections = (max_connections, max_client_connections)
    limits = Limits(max_request_bytes, max_samples, max_concurrent, *connections, request_seconds, timeout_ms)
    key = key_of(key_file)
    run(
        local_copy(export_dir, "export"),
        follow,
        host=host,
        port=port,
        health_port=health_port,
        limits=limits,
        max_age=max_age,
        obeys_pin=not ignore_pin,
        key=key,
        shadow=_shadow(shadow, shadow_follow, shadow_share, shadow_log, shadow_log_bytes, key),
        workers=workers,
    )


def _server() -> Callable[..., None]:
    try:
        from cowrec.trainer.serving.server import serve
    except ModuleNotFoundError as error:
        remedy = "pip install 'cowrec[serve]'"
        raise ImportError(f"serve requires {error.name}, which is not installed: {remedy}") from error
    return serve


def _shadow(
    export: str | None, follow: str | None, share: float, log: Path | None, log_bytes: int, key: "SigningKey | None"
) -> "ShadowConfig | None":
    from cowrec.trainer.runs.remote_run import local_copy
    from cowrec.trainer.serving.shadow.config import ShadowConfig

    if export:
        return ShadowConfig(local_copy(export, "export"), follow, share, log, log_bytes, key)
    if follow or log or share != 1:
        raise ValueError(
            "--shadow-follow, --shadow-share and --shadow-log need --shadow, the folder of an exported model"
        )
    return None


@app.command()
def shadow(
    log: Annotated[Path, typer.Argument(parser=parse_local, help="File that cowrec serve --shadow-log has written.")],
    labels: Annotated[
        Path,
        typer.Option(
            parser=parse_local, help="Parquet, .csv or .jsonl file with the columns sample_id and that of the label."
        ),
    ],
    label: Annotated[str, typer.Option(help="Column of the label.")] = "label",
) -> None:
    """Compares a shadow with the served model, on the samples of its log whose label is known.

    Example: `cowrec shadow shadow.jsonl --labels clicks.parquet --label click`
    """
    from cowrec.trainer.reports.text_table import aligned
    from cowrec.trainer.serving.shadow.log import compare

    rows = [["model", "samples", "AUC", "logloss", "calibration", "calibration error"]]
    for name, quality in compare(log, labels, label).items():
        values = [f"{quality.auc:.4f}", f"{quality.logloss:.4f}", f"{quality.calibration:.3f}"]
        rows.append([name, f"{quality.rows:,}", *values, f"{quality.calibration_error:.4f}"])
    print(aligned(rows))
