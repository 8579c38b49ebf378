"""Whether one tenant can tell what another has asked: by tokens, by keys, by embeddings and by time (L25).

    python -m bench.tenants --json

A small cluster of real processes serves two tenants by their API keys. Each of `--probes` rounds takes two new prompts
p and q of `--tokens` tokens. The first tenant sends p; then, in an order drawn anew each round,

- cross: the second tenant sends p, which only the first has sent before;
- fresh: the second tenant sends q, which nobody has sent before;
- same:  the first tenant sends p again.

`auc_cross` is the chance that a cross probe's first token came sooner than a fresh one's (0.5: time tells nothing);
`auc_same` the same for same against the first tenant's own first times. A cache that were shared would show in
`auc_cross` as plainly as its hits show in `auc_same`, in the same run under the same noise. Besides, counts that need
no clock: tokens that cross probes found cached, also when both tenants send a prompt at once; block keys that both have
for one prompt; tokens that either loads from the store when all other tiers are emptied; and, with DeepSeek-V4.1-tiny
and an encoder, embeddings per picture that both sent.
"""

from __future__ import annotations

import hashlib
import io
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import PIL.Image

from bench._progress import Advance, Phases
from bench._report import Report, arguments, emit, positive
from headrace.cli.ask import Answer, Message, chat_prompt, gather, token_prompt
from headrace.cli.client import RouterClient, replica_status
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make
from headrace.cli.model_folder import find_model
from headrace.engine.folders import models_directory
from headrace.v1 import common_pb2, control_pb2, inference_pb2

TIMEOUT_S = 120.0
CROSS_LIMITS = (0.42, 0.58)
SAME_LIMIT = 0.95
STORE_SETS = ("cache.min_load_tokens=1", "cache.break_even=false", "cache.load_deadline_ms=20000")
"""Everything that can be loaded is loaded, however slow the machine is."""
IN_FLIGHT_EVERY = 10
"""Every so many rounds both tenants also send one more prompt at the same moment."""


@dataclass
class Probes:
    """What the rounds showed. Times to the first token in seconds, as the clients saw them."""

    first: list[float] = field(default_factory=list)
    cross: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    cross_reused: int = 0
    """Tokens that cross probes found cached or loaded, those in flight included."""
    same_reused: int = 0
    shared_keys: int = 0
    """Block keys of a prompt that both tenants have."""
    in_flight: int = 0
    """Prompts sent by both at once."""


@dataclass
class StoreProbes:
    """What rounds through the store showed: device pools and host tiers are emptied before every probe."""

    rounds: int = 0
    cross_loaded: int = 0
    """Tokens that the second tenant loaded of prompts that only the first had stored."""
    same_loaded: int = 0


@dataclass
class Pictures:
    """What pictures of both tenants showed."""

    sent: int = 0
    shared: int = 0
    """Pictures for which the second tenant added no embedding of its own."""
    repeated: int = 0
    """Pictures for which a tenant's second time added one."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--probes", type=positive, default=200, help="rounds")
    parser.add_argument("--tokens", type=positive, default=600, help="length of a prompt")
    parser.add_argument("--stored", type=int, default=10, help="rounds through the store; 0: none")
    parser.add_argument("--pictures", type=int, default=20, help="pictures that both tenants send; 0: none")
    parser.add_argument("--model", default="deepseek-v41-tiny", help="of the text probes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with Phases() as progress:
        with (
            two_tenants(model_folder(options.model), {"prefill": 1, "decode": 1}) as tenants,
            progress.phase("probes", options.probes) as advance,
        ):
            probes = probe(tenants, options.probes, options.tokens, options.seed, advance)
        stored = StoreProbes()
        if options.stored:
            with (
                tempfile.TemporaryDirectory(prefix="headrace-tenants-store-") as folder,
                two_tenants(model_folder(options.model), {"prefill": 1, "decode": 1}, STORE_SETS, folder) as tenants,
                progress.phase("store", options.stored) as advance,
            ):
                stored = probe_store(tenants, options.stored, options.tokens, options.seed, advance)
        pictures = Pictures()
        if options.pictures:
            replicas = {"encoder": 1, "prefill": 1, "decode": 1}
            with (
                two_tenants(model_folder("deepseek-v41-tiny"), replicas) as tenants,
                progress.phase("pictures", options.pictures) as advance,
            ):
                pictures = send_pictures(tenants, options.pictures, options.seed, advance)
    report = make_report(probes, stored, pictures, options.tokens)
    emit(report, as_json=options.json)
    sys.exit(0 if report.results["separate"] and report.results["hits_visible"] else 1)


def model_folder(name: str) -> Path:
    """The named model; the tiny one is made where it is missing."""
    return make(name, models_directory(), 0) if name == "deepseek-v41-tiny" else find_model(name, None)


@dataclass(frozen=True)
class TwoTenants:
    """A cluster and its callers."""

    cluster: LocalCluster
    first: RouterClient
    second: RouterClient
    operator: RouterClient


@contextmanager
def two_tenants(
    folder: Path, replicas: dict[str, int], sets: Sequence[str] = (), store: str | None = None
) -> Iterator[TwoTenants]:
    """A cluster that knows two tenants and an operator, by keys drawn here."""
    keys = {name: secrets.token_urlsafe(24) for name in ("first", "second", "operator")}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    with tempfile.TemporaryDirectory(prefix="headrace-tenants-") as scratch:
        file = Path(scratch, "tenants.toml")
        file.write_text(
            "".join(f'[tenants.{name}]\nkeys = ["{digests[name]}"]\n' for name in ("first", "second"))
            + f'[operators.operator]\nkeys = ["{digests["operator"]}"]\n'
        )
        spec = ClusterSpec(folder, replicas, sets=(f"router.tenants={file}", *sets), store=store)
        with LocalCluster(spec, run_dir=Path(scratch, "run")) as cluster:
            clients = [RouterClient(cluster.router, api_key=keys[name]) for name in ("first", "second", "operator")]
            try:
                yield TwoTenants(cluster, *clients)
            finally:
                for client in clients:
                    client.close()


def probe(tenants: TwoTenants, rounds: int, tokens: int, seed: int, advance: Advance = lambda: None) -> Probes:
    """Run the rounds of the module's docstring."""
    dice = random.Random(seed)
    vocabulary = tenants.first.models().models[0].vocab_size
    found = Probes()
    ask(tenants.first, prompt_of(dice, vocabulary, tokens))
    ask(tenants.second, prompt_of(dice, vocabulary, tokens))
    for number in range(rounds):
        p, q = prompt_of(dice, vocabulary, tokens), prompt_of(dice, vocabulary, tokens)
        found.first.append(ttft(ask(tenants.first, p)))
        kinds = ["cross", "fresh", "same"]
        dice.shuffle(kinds)
        for kind in kinds:
            if kind == "cross":
                answer = ask(tenants.second, p)
                found.cross_reused += reused(answer)
            elif kind == "fresh":
                answer = ask(tenants.second, q)
                found.cross_reused += reused(answer)
            else:
                answer = ask(tenants.first, p)
                found.same_reused += reused(answer)
            getattr(found, kind).append(ttft(answer))
        found.shared_keys += shared_keys(tenants.operator, p)
        if number % IN_FLIGHT_EVERY == 0:
            at_once(tenants, prompt_of(dice, vocabulary, tokens), found)
        advance()
    return found


def at_once(tenants: TwoTenants, prompt: inference_pb2.Prompt, found: Probes) -> None:
    """Both tenants send one new prompt at the same moment: neither may find anything of the other's."""
    found.cross_reused += sum(reused(answer) for answer in both(tenants, prompt))
    found.in_flight += 1


def both(tenants: TwoTenants, prompt: inference_pb2.Prompt) -> list[Answer]:
    """The same prompt from both tenants at the same moment."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda client: ask(client, prompt), (tenants.first, tenants.second)))


def probe_store(
    tenants: TwoTenants, rounds: int, tokens: int, seed: int, advance: Advance = lambda: None
) -> StoreProbes:
    """The first tenant sends a prompt; when the store has it, all other tiers are emptied, and both send it."""
    dice = random.Random(seed + 1)
    vocabulary = tenants.first.models().models[0].vocab_size
    upper = control_pb2.ClearCacheRequest(
        everything=True, tiers=[control_pb2.CACHE_TIER_DEVICE, control_pb2.CACHE_TIER_HOST]
    )
    found = StoreProbes()
    for _ in range(rounds):
        prompt = prompt_of(dice, vocabulary, tokens)
        ask(tenants.first, prompt)
        until_stored(tenants.operator, prompt)
        for client in dice.sample((tenants.first, tenants.second), 2):
            tenants.operator.clear_cache(upper)
            loaded = reused(ask(client, prompt))
            if client is tenants.first:
                found.same_loaded += loaded
            else:
                found.cross_loaded += loaded
        found.rounds += 1
        advance()
    return found


def until_stored(operator: RouterClient, prompt: inference_pb2.Prompt) -> None:
    """Wait until the store has every block of the first tenant's prompt. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        blocks = operator.find_cache(control_pb2.FindCacheRequest(prompt=prompt, tenant="first")).blocks
        if all(any(place.tier == control_pb2.CACHE_TIER_STORE for place in block.places) for block in blocks):
            return
        time.sleep(0.05)
    raise TimeoutError("the store did not become durable")


def send_pictures(tenants: TwoTenants, count: int, seed: int, advance: Advance = lambda: None) -> Pictures:
    """Each picture from the first tenant, the second, both again; every other picture from both at once."""
    found = Pictures()
    for number in range(count):
        prompt = chat_prompt([Message("user", "What is in this picture?", (picture(seed * 1000 + number),))])
        before = embedding_rows(tenants)
        if number % 2:
            answers = both(tenants, prompt)
        else:
            answers = [ask(client, prompt) for client in (tenants.first, tenants.second)]
        assert answers[0].usage is not None
        tokens = answers[0].usage.image_tokens
        after = embedding_rows(tenants)
        found.sent += 1
        found.shared += after - before != 2 * tokens
        for client in (tenants.first, tenants.second):
            ask(client, prompt)
        found.repeated += embedding_rows(tenants) != after
        advance()
    return found


def ask(client: RouterClient, prompt: inference_pb2.Prompt) -> Answer:
    """One token: what a prober needs."""
    stop = common_pb2.StopParams(max_tokens=1, ignore_eos=True)
    request = inference_pb2.GenerateRequest(prompt=prompt, stop=stop, sampling=common_pb2.SamplingParams(temperature=0))
    return gather(client.generate(request, timeout_s=TIMEOUT_S))


def prompt_of(dice: random.Random, vocabulary: int, tokens: int) -> inference_pb2.Prompt:
    """Ids that no other prompt begins with; special ones, which stand at both ends of vocabularies, are left out."""
    return token_prompt([dice.randrange(16, min(vocabulary - 64, 256)) for _ in range(tokens)])


def ttft(answer: Answer) -> float:
    assert answer.first_token_s is not None
    return answer.first_token_s


def reused(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens + answer.usage.loaded_tokens


def shared_keys(operator: RouterClient, prompt: inference_pb2.Prompt) -> int:
    """Block keys that a prompt has under both tenants' salts."""
    keys = [
        {block.key for block in operator.find_cache(control_pb2.FindCacheRequest(prompt=prompt, tenant=tenant)).blocks}
        for tenant in ("first", "second")
    ]
    return len(keys[0] & keys[1])


def embedding_rows(tenants: TwoTenants) -> int:
    """Rows that the encoder keeps."""
    address = tenants.cluster.child("encoder-0").address
    assert address is not None
    pool = next(pool for pool in replica_status(address).pools if pool.name == "embeddings")
    return int(pool.total - pool.free)


def picture(number: int) -> bytes:
    """A small PNG of its own."""
    dice = random.Random(number)
    image = PIL.Image.new("RGB", (90, 60), tuple(dice.randrange(256) for _ in range(3)))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def auc(sooner: Sequence[float], later: Sequence[float]) -> float:
    """Chance that one of `sooner` is below one of `later`, ties counted half: the area under the curve of a prober who
    takes short times for hits. O(n log n) by ranks (Mann–Whitney)."""
    merged = sorted([(value, 0) for value in sooner] + [(value, 1) for value in later])
    wins = at = 0.0
    index = 0
    while index < len(merged):
        end = index
        while end < len(merged) and merged[end][0] == merged[index][0]:
            end += 1
        tied = [which for _, which in merged[index:end]]
        mine, theirs = tied.count(0), tied.count(1)
        wins += theirs * (at + mine / 2)
        at += mine
        index = end
    return wins / (len(sooner) * len(later))


def make_report(probes: Probes, stored: StoreProbes, pictures: Pictures, tokens: int) -> Report:
    """Figures against the limits."""
    cross, same = auc(probes.cross, probes.fresh), auc(probes.same, probes.first)
    counts = (probes.cross_reused, probes.shared_keys, stored.cross_loaded, pictures.shared)
    low, high = CROSS_LIMITS
    return Report(
        "tenants",
        {
            "probes": len(probes.cross),
            "prompt_tokens": tokens,
            "auc_cross": round(cross, 4),
            "auc_same": round(same, 4),
            "cross_reused_tokens": probes.cross_reused,
            "same_reused_tokens": probes.same_reused,
            "shared_block_keys": probes.shared_keys,
            "prompts_in_flight_at_once": probes.in_flight,
            "store_rounds": stored.rounds,
            "cross_loaded_tokens": stored.cross_loaded,
            "same_loaded_tokens": stored.same_loaded,
            "pictures": pictures.sent,
            "shared_embeddings": pictures.shared,
            "embeddings_computed_twice_for_one_tenant": pictures.repeated,
            "separate": low <= cross <= high and not any(counts),
            "hits_visible": same >= SAME_LIMIT
            and probes.same_reused > 0
            and (not stored.rounds or stored.same_loaded > 0),
            "limits": {"auc_cross": list(CROSS_LIMITS), "auc_same": SAME_LIMIT},
        },
        [
            {"probe": name, "ttft_p50_ms": round(median(times) * 1000, 2), "n": len(times)}
            for name, times in (
                ("first tenant, first time", probes.first),
                ("second tenant, sent by the first before (cross)", probes.cross),
                ("second tenant, sent by nobody before (fresh)", probes.fresh),
                ("first tenant, again (same)", probes.same),
            )
        ],
        ["AUC: chance that the probe's first token comes sooner than that of a prompt which nobody has sent."],
    )


if __name__ == "__main__":
    main()
