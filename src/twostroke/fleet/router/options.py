"""The options of a router: its replicas, its policy, its waiting times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from twostroke.core.errors import UsageError
from twostroke.core.option_schema import Option
from twostroke.server.http_options import PORT, HttpOptions

# The keys of `fleet.routing.policy.POLICIES`, whose import takes NumPy.
POLICY_NAMES: Final = ("prefix", "least-work", "two-choices", "round-robin")
_MAX_WAIT_S: Final = 3600


class RouteOptions(HttpOptions):
    """The options of `twostroke route`: the router's address, replicas, policy and waiting times.

    Attributes:
        replica_key: the key that the router shows to its replicas in place of its clients' keys,
            and with which a client may read `/api/state`. Without it, clients' keys are passed
            on.
    """

    port: Annotated[int, PORT] = 8080
    replicas: Annotated[
        tuple[str, ...],
        Option(
            "--replica",
            metavar="URL",
            help="A server, such as http://10.0.0.7:8000, of Twostroke, vLLM or llama-server; "
            "repeatable.",
        ),
    ] = ()
    discover: Annotated[
        str | None,
        Option(
            "--discover",
            metavar="NAME:PORT",
            default="none",
            help="Use every address of this DNS name, such as a headless service of Kubernetes.",
        ),
    ] = None
    listing: Annotated[
        Path | None,
        Option(
            "--replicas-file",
            form="path",
            metavar="FILE",
            default="none",
            help="Use the servers whose URLs FILE has, one on each line, and follow its changes.",
        ),
    ] = None
    startable_models: Annotated[
        tuple[str, ...],
        Option(
            "--scale-from-zero",
            metavar="NAME",
            help="A model that may have no replica: its requests wait while an autoscaler starts "
            "one; repeatable.",
        ),
    ] = ()
    model_listing: Annotated[
        Path | None,
        Option(
            "--models-file",
            form="path",
            metavar="FILE",
            default="none",
            help="As --scale-from-zero for each model that FILE lists in JSON, and follow its "
            "changes; `twostroke fleet` writes such a file.",
        ),
    ] = None
    store: Annotated[
        str | None,
        Option(
            "--store",
            metavar="URL",
            default="none",
            help="Share API keys, with their limits and usage, with other routers in this Redis "
            "server: redis://, rediss:// or unix://. Needs the extra [store] and "
            "TWOSTROKE_REPLICA_KEY.",
        ),
    ] = None
    store_wait_s: Annotated[
        float,
        Option(
            "--store-wait",
            low=0.001,
            high=60,
            help="Seconds that a request waits for the store before the router goes on alone.",
        ),
    ] = 0.2
    policy: Annotated[
        str,
        Option(
            "--policy",
            choices=POLICY_NAMES,
            help="How to choose a replica; prefix: the replica where the first token comes "
            "soonest.",
        ),
    ] = "prefix"
    replica_key: str | None = None
    wait_s: Annotated[
        float,
        Option(
            "--wait",
            low=0,
            high=_MAX_WAIT_S,
            help="Seconds that a request waits if no replica is ready.",
        ),
    ] = 5.0
    start_wait_s: Annotated[
        float,
        Option(
            "--start-wait",
            low=0,
            high=_MAX_WAIT_S,
            help="Seconds that a request waits while the first replica of its model starts; 0: it "
            "is refused at once, and the replica starts nevertheless.",
        ),
    ] = 600.0
    start_queue: Annotated[
        int,
        Option(
            "--start-queue",
            low=0,
            high=100_000,
            help="Most requests that wait for the first replica of a model; others are refused.",
        ),
    ] = 1000
    resume_wait_s: Annotated[
        float,
        Option(
            "--resume-wait",
            low=0,
            high=_MAX_WAIT_S,
            help="Seconds that a stream whose replica was lost waits for another replica, which "
            "continues it; 0: it ends with an error.",
        ),
    ] = 60.0
    eject_s: Annotated[
        float,
        Option(
            "--eject-after",
            low=1,
            high=_MAX_WAIT_S,
            help="Seconds of silence after which a replica's requests are given up.",
        ),
    ] = 5.0
    mixed: Annotated[
        bool,
        Option(
            "--mixed",
            help="Accept replicas of one model whose versions or numerics differ.",
        ),
    ] = False
    stable_prefix: Annotated[
        bool,
        Option(
            "--stable-prefix",
            help="Route by prompts without the lines that change with each request, for replicas "
            "with the same option.",
        ),
    ] = False
    overflow: Annotated[
        Path | None,
        Option(
            "--overflow",
            form="path",
            metavar="FILE",
            default="none",
            help="Send requests to APIs of vendors by the rules in a YAML file, for example if no "
            "replica is ready. Their prompts leave your machines.",
        ),
    ] = None
    busy_s: Annotated[
        float,
        Option(
            "--busy",
            low=0.001,
            high=_MAX_WAIT_S,
            help="Mean seconds of queued work of a replica above which /metrics asks for more "
            "replicas.",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        """Check each value, and that there are replicas.

        Raises:
            UsageError: neither replicas, nor a DNS name, nor a file is given, or a value is wrong.
        """
        if not self.replicas and self.discover is None and self.listing is None:
            raise UsageError(
                "Name servers with --replica URL, --discover NAME:PORT or --replicas-file FILE."
            )
        if "" in self.startable_models:
            raise UsageError("must be the name of a model, not empty.", field="startable_models")
        super().__post_init__()
