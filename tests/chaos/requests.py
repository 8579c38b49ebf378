"""What is asked: distinct requests whose answers are fixed by their seeds."""

from __future__ import annotations

import io
import random

import PIL.Image

from headrace.v1 import common_pb2, inference_pb2

IMAGE_TOKEN = 399
"""Of the tiny DeepSeek-V4.1."""
LOW, HIGH = 3, 243
SHARED_PREFIXES = 3
SHARED_TOKENS = 320


def picture(rng: random.Random) -> bytes:
    """A small PNG, unlike every other one."""
    colour = tuple(rng.randrange(256) for _ in range(3))
    image = PIL.Image.new("RGB", (90, 60), colour)
    image.paste((255 - colour[0], 20, 200), (10, 5, 50, 10 + rng.randrange(45)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def templates(
    seed: int, count: int, *, pictures: bool, texts: bool, tokens: int
) -> list[inference_pb2.GenerateRequest]:
    """`count` requests of about so many tokens; of every six one is of each kind: greedy, seeded, three choices with
    penalties and log-probabilities, stop strings (stop tokens where the model has no `texts`), a long prompt over a
    shared prefix, and pictures (else seeded)."""
    found = []
    for index in range(count):
        rng = random.Random(f"{seed} template {index}")
        found.append(_template(rng, seed, index % 6, pictures, texts, tokens))
    return found


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(LOW, HIGH) for _ in range(length)]


def _template(
    rng: random.Random, seed: int, kind: int, pictures: bool, texts: bool, tokens: int
) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.TokenPrompt(token_ids=_ids(rng, rng.randrange(20, 120)))
    sampling = common_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=1 + rng.randrange(1 << 40))
    stop = common_pb2.StopParams(max_tokens=rng.randrange(tokens // 2, tokens * 3 // 2), ignore_eos=True)
    if kind == 0:
        sampling.temperature = 0.0
        sampling.ClearField("top_p")
    elif kind == 2:
        sampling.n, sampling.logprobs = 3, 2
        sampling.presence_penalty, sampling.repetition_penalty = 0.4, 1.1
        stop.max_tokens = max(2, tokens // 2)
    elif kind == 3:
        sampling.logprobs = 0
        # Single letters come soon, and of the others the beginnings: much is held back until it is decided.
        strings = [rng.choice("aeiou") + rng.choice("bcd"), "the", rng.choice("XYZ"), "e\x00"]
        if texts:
            stop.stop.extend(strings)
        else:
            stop.stop_token_ids.extend(rng.sample(range(LOW, HIGH), 12))
        stop.min_tokens = 2
    elif kind == 4:
        shared = random.Random(f"{seed} prefix {rng.randrange(SHARED_PREFIXES)}")
        prompt.token_ids[:0] = _ids(shared, SHARED_TOKENS)
    elif kind == 5 and pictures:
        prompt.token_ids.insert(rng.randrange(1, 15), IMAGE_TOKEN)
        prompt.images.append(inference_pb2.Image(data=picture(rng)))
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(tokens=prompt), sampling=sampling, stop=stop, report=True
    )
