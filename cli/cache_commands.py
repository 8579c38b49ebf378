"""The flags of `headrace cache …`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import CliError
from headrace.cli.flags import Json, Router

if TYPE_CHECKING:
    from headrace.cli.cache_targets import CacheTarget

app = typer.Typer(
    name="cache",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into and manage the cache of computed prefixes: of a running cluster, or of a store's folder (--store).",
)

ApiKey = Annotated[
    str | None,
    typer.Option(envvar="HEADRACE_API_KEY", show_envvar=False, help="An operator's; default: $HEADRACE_API_KEY."),
]
Store = Annotated[
    Path | None, typer.Option("--store", metavar="DIR", help="Work on the store in this folder, without a cluster.")
]
Index = Annotated[str, typer.Option(help="With --store: its index, as cache.index has it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="FOLDER|NAME", help="With --store: the model whose prefixes are meant.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="With --store: settings of the workers that shape keys (load.…)."),
]
Secret = Annotated[
    str | None,
    typer.Option(
        envvar=["HEADRACE_ROUTER__SALT_SECRET", "HEADRACE_ROLES__ROUTER__ROUTER__SALT_SECRET"],
        show_envvar=False,
        help="With --store: the router's router.salt_secret; better by its environment variable.",
    ),
]
Tenant = Annotated[str, typer.Option(help="Whose prefixes; default: `default`, everybody of a router without tenants.")]
Chat = Annotated[bool, typer.Option("--chat", help="Render the file's text as a user's message.")]
PromptFile = Annotated[
    Path, typer.Argument(metavar="PROMPT-FILE", help="Text, or a .json file with a request of `headrace offline`.")
]


@dataclass(frozen=True)
class Where:
    """What the flags of every command name."""

    router: str | None
    api_key: str | None
    store: Path | None
    index: str = "sqlite"
    model: str | None = None
    sets: tuple[str, ...] = ()
    secret: str | None = None

    def open(self) -> AbstractContextManager[CacheTarget]:
        from headrace.cli.cache_targets import cluster, store_folder
        from headrace.cli.model_folder import find_model
        from headrace.cli.state import find_router

        if self.store is None:
            return cluster(find_router(self.router), self.api_key)
        if self.router is not None:
            raise CliError("--router and --store exclude each other")
        folder = None if self.model is None else find_model(self.model, None)
        return store_folder(self.store, self.index, folder, self.sets, self.secret)

    def run(self, operation: Callable[[CacheTarget], int]) -> None:
        from headrace.cli.failures import told

        with told(self.router or ""), self.open() as target:
            status = operation(target)
        raise typer.Exit(status)


def _sure(question: str, yes: bool) -> None:
    """Ask where somebody can answer; scripts say --yes or are not asked."""
    if not yes and sys.stdin.isatty() and not typer.confirm(question):
        raise CliError("nothing was done")


@app.command()
def stats(
    router: Router = None, api_key: ApiKey = None, store: Store = None, index: Index = "sqlite", json: Json = False
) -> None:
    """What each tier holds, and what became of reads and writes."""
    from headrace.cli import cache

    Where(router, api_key, store, index).run(lambda target: cache.stats(target, as_json_text=json))


@app.command()
def verify(
    router: Router = None, api_key: ApiKey = None, store: Store = None, index: Index = "sqlite", json: Json = False
) -> None:
    """Read and check every record of the store; exit status 1 when one is bad."""
    from headrace.cli import cache

    Where(router, api_key, store, index).run(lambda target: cache.verify(target, as_json_text=json))


@app.command()
def gc(
    router: Router = None, api_key: ApiKey = None, store: Store = None, index: Index = "sqlite", json: Json = False
) -> None:
    """Run the store's sweeper now: expire, adopt what dead writers left, evict under pressure."""
    from headrace.cli import cache

    Where(router, api_key, store, index).run(lambda target: cache.collect(target, as_json_text=json))


@app.command("drop-namespace")
def drop_namespace(
    namespace: Annotated[str, typer.Argument(metavar="HEX|all", help="64 digits as in the store's paths, or `all`.")],
    router: Router = None,
    api_key: ApiKey = None,
    store: Store = None,
    index: Index = "sqlite",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Drop every prefix of one model (weights, layout, tokenizer), or of all."""
    from headrace.cli import cache
    from headrace.v1 import control_pb2

    everything = namespace == "all"
    request = (
        control_pb2.ClearCacheRequest(everything=True)
        if everything
        else control_pb2.ClearCacheRequest(namespace=cache.parse_namespace(namespace))
    )
    _sure(f"Drop {'everything that is cached' if everything else f'namespace {namespace[:16]}…'}?", yes)
    Where(router, api_key, store, index).run(lambda target: cache.drop(target, request, as_json_text=json))


@app.command("drop-tenant")
def drop_tenant(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    router: Router = None,
    api_key: ApiKey = None,
    store: Store = None,
    index: Index = "sqlite",
    secret: Secret = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Erase what a tenant's requests stored, in every tier. Revoke its API keys first, or it comes back."""
    from headrace.cli import cache
    from headrace.v1 import control_pb2

    _sure(f"Erase everything that is cached for tenant {tenant}?", yes)
    request = control_pb2.ClearCacheRequest(tenant=tenant)
    Where(router, api_key, store, index, secret=secret).run(
        lambda target: cache.drop(target, request, as_json_text=json)
    )


@app.command()
def pin(
    prompt_file: PromptFile,
    tenant: Tenant = "default",
    chat: Chat = False,
    router: Router = None,
    api_key: ApiKey = None,
    store: Store = None,
    index: Index = "sqlite",
    model: Model = None,
    sets: Sets = None,
    secret: Secret = None,
    json: Json = False,
) -> None:
    """Keep what the store has of a prompt until it is dropped."""
    from headrace.cli import cache

    prompt = cache.read_prompt(prompt_file, chat=chat)
    Where(router, api_key, store, index, model, tuple(sets or ()), secret).run(
        lambda target: cache.pin(target, prompt, tenant, as_json_text=json)
    )


@app.command()
def find(
    prompt_file: PromptFile,
    tenant: Tenant = "default",
    chat: Chat = False,
    router: Router = None,
    api_key: ApiKey = None,
    store: Store = None,
    index: Index = "sqlite",
    model: Model = None,
    sets: Sets = None,
    secret: Secret = None,
    json: Json = False,
) -> None:
    """Tell for each block of a prompt which tier has it."""
    from headrace.cli import cache

    prompt = cache.read_prompt(prompt_file, chat=chat)
    Where(router, api_key, store, index, model, tuple(sets or ()), secret).run(
        lambda target: cache.find(target, prompt, tenant, as_json_text=json)
    )
