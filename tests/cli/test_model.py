"""`headrace model make`, `list`, and what a folder says of its loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.exits import CliError
from headrace.cli.model import facts_of, make
from headrace.cli.model_folder import find_model, list_model_folders
from headrace.services.encoder.settings import EncoderSettings
from headrace.services.router.settings import RouterSettings
from headrace.services.runtime.settings_load import SettingsError, load


def test_a_made_folder_is_whole_and_stays(tiny: Path) -> None:
    facts = facts_of(tiny)
    assert (facts.name, facts.family, facts.load["entry_format"]) == ("deepseek-v41-tiny", "deepseek_v41", "float32")
    weights = tiny / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert make("deepseek-v41-tiny", tiny.parent, 0) == tiny
    assert weights.stat().st_mtime_ns == before
    assert [folder.name for folder in list_model_folders(tiny.parent)] == ["deepseek-v41-tiny"]


def test_the_seed_decides_the_weights(tiny: Path, tmp_path: Path) -> None:
    again = make("deepseek-v41-tiny", tmp_path / "same", 0)
    other = make("deepseek-v41-tiny", tmp_path / "other", 1)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tiny, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_vocabulary_and_token_map_follow_the_tokenizer(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    assert config["text_config"]["vocab_size"] == len(tokenizer["model"]["vocab"])
    assert 0 < config["text_config"]["engram_compressed_vocab_size"] < config["text_config"]["vocab_size"]


def test_folder_settings_stand_below_all_others(tiny: Path) -> None:
    folder = f"model.folder={tiny}"
    assert load(EncoderSettings, sets=[folder], environ={}).load.batch_invariant
    assert not load(EncoderSettings, sets=[folder, "load.batch_invariant=false"], environ={}).load.batch_invariant
    environ = {"HEADRACE_MODEL__FOLDER": str(tiny), "HEADRACE_LOAD__BATCH_INVARIANT": "false"}
    settings = load(EncoderSettings, environ=environ)
    assert not settings.load.batch_invariant
    assert settings.load.entry_format == "float32"
    assert load(RouterSettings, sets=[folder], environ={}).model.folder == tiny


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[load]\nnumeric = 1\n", r"load.numeric \(.*headrace.toml\): unknown key"),
        ("[engine]\nthreads = 1\n", r"engine.threads \(.*headrace.toml\): a model folder may set only \[load\]"),
        ("[load", "is no TOML"),
    ],
)
def test_a_wrong_folder_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "headrace.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(EncoderSettings, sets=[f"model.folder={tmp_path}"], environ={})


def test_names_find_folders(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path))
    for name in ("small-bfloat16", "small-float32", "exact-float32"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert find_model(str(tiny)) == tiny.resolve()
    assert find_model("small").name == "small-bfloat16"
    assert find_model("small", "float32").name == "small-float32"
    assert find_model("exact").name == "exact-float32"
    with pytest.raises(CliError, match=r"has exact-float32, small-bfloat16, small-float32.*model make"):
        find_model("deepseek-v41-tiny")
