"""The special tokens of DeepSeek's V4.1 encoding, as deepseek-recipe spells them."""

from __future__ import annotations


def v41_special_spellings() -> tuple[str, ...]:
    """Spellings of every special token that deepseek-recipe's V4.1 encoding knows, in its order."""
    from deepseek_recipe import SpecialToken

    names = (
        "Bos",
        "Eos",
        "ThinkingStart",
        "ThinkingEnd",
        "System",
        "User",
        "Assistant",
        "LatestReminder",
        "Dsml",
        "Image",
        "Ref",
        "RefEnd",
        "Box",
        "BoxEnd",
        "Point",
        "PointEnd",
        "Polygon",
        "PolygonEnd",
    )
    return tuple(getattr(SpecialToken, name).default_str() for name in names)
