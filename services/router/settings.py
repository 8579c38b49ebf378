"""Settings of a router process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, SecretStr, model_validator

from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import FrontSettings, Section, ServiceSettings


class AdmissionSection(Section):
    """The bounded queue in front of the cluster (L12; router/admission/README.md)."""

    max_running: int = Field(default=256, ge=1)
    """Requests that may be in the cluster at once."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that may wait here, for a place among the running ones or for room at decode; more are refused with
    RESOURCE_EXHAUSTED and a time to come back. 0: whoever finds no room is refused at once."""
    max_waiting_tokens: int = Field(default=16_777_216, ge=1)
    """Uncached prompt tokens that may wait here. A larger request waits alone."""
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """Of the waiting room that other tenants leave free, one tenant takes at most this share. Without a file of tenants
    there is one tenant, which may take all."""
    quantum_tokens: int = Field(default=2048, ge=1)
    """Uncached tokens that a tenant may take at its turn; small values interleave tenants finely."""
    capacity_wait_seconds: float = Field(default=30.0, ge=0)
    """How long a request that no decode replica has room for waits for some before it is refused."""


class RequestSection(Section):
    """What a request may ask for, and what absent fields mean."""

    max_tokens: int = Field(default=4096, ge=1)
    """Most tokens per choice; also their number when a request gives none."""
    max_n: int = Field(default=8, ge=1)
    """Most choices."""
    max_stops: int = Field(default=16, ge=0)
    """Most stop strings, and most stop token ids."""
    max_stop_characters: int = Field(default=256, ge=1)
    """Longest stop string."""
    max_images: int = Field(default=16, ge=0)
    """Most images."""
    max_image_bytes: ByteSize = Field(default=ByteSize(20 * 1024 * 1024), ge=1)
    """Largest image as it is sent; the encoders' encoder.max_image_bytes should not be smaller."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, images not counted. Default: the model's context."""
    max_snapshots: int = Field(default=64, ge=0)
    """Most positions in snapshot_at."""
    max_text_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    """Longest prompt as text, all parts together."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=604_800)
    """Deadline of a request that gives none; every request has one (L6)."""
    max_attempts: int = Field(default=5, ge=1)
    """Tries at one request, the first included, when a worker fails; later ones continue what the client has."""
    recovery_seconds: float = Field(default=10.0, ge=0)
    """How long a request whose worker failed waits for another one that can take its place."""
    constraint_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for a decode replica that compiles a constraint, beyond that for its answer to a reservation. The
    first constraint of a replica waits for its compiler to start."""
    thinking: bool = False
    """Whether chats without `thinking` ask the model to reason first."""


class ReplaySection(Section):
    """Bounded replay of models with a sliding window (spec/protocol.md, "Length and replay")."""

    mode: Literal["compact", "mask", "off"] = "compact"
    """How the tail of a prompt runs through the consumer layers."""
    keep_tokens: int | None = Field(default=None, ge=1)
    """K; default: window + 2 · backtracking."""
    backtracking: int = Field(default=6, ge=1)
    """As in the workers' load.backtracking."""


class RouterSection(Section):
    """The router itself."""

    protocol: Literal["auto", "template", "v4.1"] = "auto"
    """How chats become prompts: the model folder's template or DeepSeek's V4.1 encoding; `auto` asks config.json."""
    salt_secret: SecretStr | None = None
    """Secret of at least 16 characters from which tenants' cache salts derive; routers of one cluster share it.
    Default: drawn at start, so cached prefixes are not found again after a restart of the router."""
    tenants: Path | None = None
    """TOML file that says which API key is whose (docs/operate.md, Tenants); followed. Without it, `keys` and section
    `tokens` every caller is the tenant `default`."""
    keys: str | None = None
    """Store of API keys that `headrace keys` writes: a file, or `etcd` for the registry's etcd. A key that is revoked
    there is refused within seconds."""
    operator_key: SecretStr | None = None
    """One more operator's API key beside those of `tenants`, for whoever starts this process; `headrace up` draws one
    at each start. Give it by its environment variable, which `ps` does not show. Unused where nobody is asked."""
    load_stale_seconds: float = Field(default=10.0, gt=0)
    """A load report older than this is ignored (L22)."""
    reserve_timeout_seconds: float = Field(default=5.0, gt=0)
    """Longest wait for a decode replica's answer to a reservation."""
    renew_seconds: float = Field(default=1.0, gt=0)
    """How often the leases of running requests are renewed (L8), and decode has to answer."""
    silence_seconds: float = Field(default=5.0, gt=0)
    """A decode replica that has answered nothing for so long counts as stalled: its requests are continued elsewhere.
    At least two renewals. One that is dead is noticed by its broken connection, at once."""
    adopt_timeout_seconds: float = Field(default=2.0, gt=0)
    """Longest wait for decode replicas to say whether they have a request that a client resumes."""
    credit_tokens: int = Field(default=256, ge=1)
    """Tokens that decode may send ahead of a slow client; then this request alone pauses."""
    fork_blocks: int = Field(default=131_072, ge=0)
    """Blocks of recent prompts that are remembered, about 250 bytes each, so that a snapshot is taken where a prompt
    leaves them (models with a sliding window). 0: none."""
    fork_min_tokens: int = Field(default=256, ge=1)
    """A shared prefix shorter than this gets no snapshot of its own."""

    @model_validator(mode="after")
    def _silence(self) -> Self:
        if self.silence_seconds < 2 * self.renew_seconds:
            raise ValueError(
                f"silence_seconds {self.silence_seconds:g} is less than two renewals of {self.renew_seconds:g} s: a "
                "replica that is late once would count as stalled"
            )
        return self


class FetchSection(Section):
    """Images by address (L26): whether, from where and how long. Private addresses are never fetched from."""

    enabled: bool = False
    """Fetch images that a request names by address. Off: their bytes have to be sent."""
    schemes: tuple[Literal["https", "http"], ...] = ("https",)
    """Schemes that are fetched; `data:` addresses are taken whenever fetching is on."""
    ports: tuple[int, ...] = (443,)
    """Ports that are fetched from."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """For all images of a request together, redirects included."""
    max_redirects: int = Field(default=3, ge=0, le=10)
    """Each is checked like the first address."""
    max_at_once: int = Field(default=32, ge=1)
    """Images that are fetched at once by this router; more are refused (L12)."""


class LimitsSection(Section):
    """Where the limits of tenants are counted (docs/operate.md, Tenants)."""

    shared: str | None = None
    """Redis of the cluster-wide buckets (`redis://…`, `rediss://…`, `unix://…`). Default: index.store_index where
    that is Redis. Without any, and while it does not answer, each router takes the limit divided by those that live."""
    prefix: str = "headrace:limit:"
    """Of keys there; clusters that share a Redis differ in it."""
    deadline_ms: int = Field(default=50, ge=1)
    """Longest wait of a request for Redis; then this router's share decides (L17)."""


class TokenSection(Section):
    """JSON Web Tokens as credentials beside API keys."""

    keys: Path | None = None
    """The issuer's public keys: a JWKS document or one in PEM; followed. Setting it turns tokens on."""
    issuer: str = ""
    """What the claim `iss` must be."""
    audience: str = ""
    """What the claim `aud` must be or hold."""
    algorithms: tuple[Literal["RS256", "ES256", "EdDSA"], ...] = ("ES256", "EdDSA", "RS256")
    """Signatures that are taken."""
    leeway_seconds: float = Field(default=30.0, ge=0, le=600)
    """How far the issuer's clock may be off."""
    tenant_claim: str = "tenant"
    """The claim that names the tenant, or the operator."""
    role_claim: str = "role"
    """The claim that says `operator`; without it the holder is a tenant."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.keys is not None and not (self.issuer and self.audience):
            raise ValueError("issuer and audience are needed: a token for somebody else must not be good here")
        return self


class BalanceSection(Section):
    """How prefill and decode ranks are chosen (router/balancers, docs/tune.md)."""

    weight: float = Field(default=0.02, ge=0, le=1)
    """λ: seconds of new work that a second of difference in assigned work weighs. Small: more prefix hits; large:
    evener load at every moment. Sensible from 0.005 to 0.05."""
    half_life_seconds: float = Field(default=60.0, gt=0)
    """Half-life of assigned work."""
    attention_share: float = Field(default=0.0, ge=0, le=1)
    """How much of a prefill rank's load is attention compute; the rest is time."""
    first_token_objective_ms: float | None = Field(default=None, gt=0)
    """Prefill ranks at which the first token would come later are asked after all others. Default: none, only the
    request's deadline counts."""
    token_objective_ms: float | None = Field(default=None, gt=0)
    """Time per token that running requests are promised: who would break it on every decode rank, at the time of its
    arrival there, is refused with a time to come back. Default: nobody is."""
    compute_at_decode_tokens: int = Field(default=0, ge=0)
    """A prompt of which a decode rank lacks at most so many tokens, and whose steps have room for them, is computed
    there, without prefill (router/balancers/conditional.md). 0: none."""
    neighbours: bool = True
    """Whether prefill and decode of one request may lie in different data centres, for the price of the link."""
    link_gbits: float = Field(default=400.0, gt=0)
    """Link between data centres for each eight accelerators, in Gbit/s."""


class IndexSection(Section):
    """What the router knows of prefixes: an index of the workers' tiers, fed by their events, and a view of the store
    (router/index, docs/tune.md). The store's content is never mirrored."""

    budget_bytes: ByteSize = Field(default=ByteSize(256 << 20), ge=1 << 18)
    """Memory of the index: about 47 bytes for a block (or snapshot) and its first holder, 4 to 8 for each further one.
    Over it the longest unused entries are forgotten, which costs hits."""
    store: str = ""
    """Store of the workers (`cache.store`), so that its index is asked for prefixes that no event has told of. Empty:
    only what the workers' events tell of the store is known."""
    store_index: str = "sqlite"
    """Its index: the workers' `cache.index`."""
    local_directory: str = ""
    """The workers' `cache.local_directory`, where the index is a file in it."""
    name: str = Field(default="store", min_length=1)
    """The workers' `cache.name`."""
    deadline_ms: int = Field(default=20, ge=1)
    """Longest wait of a request for the store's index (L17). A later answer is of use to the next request."""
    lookup_keys: int = Field(default=2048, ge=1)
    """Keys asked in one call; of a longer prompt the blocks that come first."""
    store_view_entries: int = Field(default=65_536, ge=1)
    """Keys whose presence in the store is remembered, about 230 bytes each."""
    present_seconds: float = Field(default=60.0, gt=0)
    """How long a key that the store has is taken to be there."""
    absent_seconds: float = Field(default=2.0, gt=0)
    """How long a key that it lacks is taken to be absent."""


class RouterSettings(ServiceSettings):
    """`headrace serve router`."""

    ROLE: ClassVar[Role] = Role.ROUTER

    router: RouterSection = RouterSection()
    limits: LimitsSection = LimitsSection()
    fetch: FetchSection = FetchSection()
    tokens: TokenSection = TokenSection()
    front: FrontSettings = FrontSettings()
    balance: BalanceSection = BalanceSection()
    index: IndexSection = IndexSection()
    admission: AdmissionSection = AdmissionSection()
    requests: RequestSection = RequestSection()
    replay: ReplaySection = ReplaySection()

    @property
    def asks_who_calls(self) -> bool:
        """Callers need a credential."""
        return self.router.tenants is not None or self.router.keys is not None or self.tokens.keys is not None

    @model_validator(mode="after")
    def _front_asks(self) -> Self:
        if self.front.port is not None and not self.asks_who_calls:
            raise ValueError(
                "front.port takes callers without a certificate: set router.keys, router.tenants or tokens.keys"
            )
        return self
