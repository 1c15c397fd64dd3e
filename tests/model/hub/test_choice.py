"""The selection of a repository's files: the files that a name asks for, and no others."""

from __future__ import annotations

import pytest

from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.hub.file_selection import (
    FileSelection,
    RepoFile,
    add_weights,
    choose_files,
    quantization,
)
from twostroke.model.hub.names import HubName

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
NOISE = ("README.md", ".gitattributes", "modeling_x.py", "pytorch_model.bin", "model.pth", "a.onnx")
SPLIT = tuple(f"Q8_0/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3))


def repo(*paths: str) -> list[RepoFile]:
    return [RepoFile(path, 10) for path in paths]


def select(requested: str | None, *paths: str) -> FileSelection:
    return choose_files(HubName("o/r", requested), repo(*paths))


def names(choice: FileSelection) -> list[str]:
    return [file.path for file in choice.files]


def refusal(requested: str | None, *paths: str) -> str:
    with pytest.raises((ModelNotFoundError, ModelFormatError)) as caught:
        select(requested, *paths)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gemma-3-270m-it-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("sub/m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("m-bf16.gguf", "BF16"),
        ("Q8_0/m-Q8_0-00001-of-00003.gguf", "Q8_0"),
        ("m-fp16.gguf", "FP16"),
        ("gpt-MXFP4.gguf", "MXFP4"),
        ("model.gguf", None),
        ("Qwen2.gguf", None),
    ],
)
def test_the_quantization_is_read_from_the_name(path: str, expected: str | None) -> None:
    assert quantization(path) == expected


def test_the_only_gguf_is_taken_without_a_note() -> None:
    choice = select(None, "model.gguf", "mmproj-model-f16.gguf", "imatrix.gguf", *NOISE)
    assert (names(choice), choice.entry, choice.note) == (["model.gguf"], "model.gguf", None)


def test_the_preferred_quantization_is_taken_and_reported() -> None:
    choice = select(None, "m-Q8_0.gguf", "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-F16.gguf")
    assert choice.entry == "m-Q4_K_M.gguf"
    assert choice.note == "o/r has 4 GGUF models: taking Q4_K_M; others: F16, Q2_K, Q8_0."
    assert select(None, "m-Q8_0.gguf", "m-F16.gguf").entry == "m-Q8_0.gguf"


def test_no_model_is_chosen_without_a_known_quantization() -> None:
    message = refusal(None, "a.gguf", "b.gguf")
    assert "has 2 GGUF models: a.gguf, b.gguf. Name one, such as 'hf:o/r:a.gguf'." in message
    assert "Name one" in refusal(None, "a-Q4_0.gguf", "b-Q4_0.gguf")


@pytest.mark.parametrize(
    "requested", ["Q8_0", "q8_0", "m-q8_0.gguf", "m-Q8_0", "sub/m-Q8_0.gguf", "SUB/M-Q8_0.GGUF"]
)
def test_a_file_is_named_by_path_name_or_quantization(requested: str) -> None:
    assert select(requested, "m-Q4_0.gguf", "sub/m-Q8_0.gguf").entry == "sub/m-Q8_0.gguf"


def test_a_quantization_is_exact() -> None:
    assert select("Q4_K_M", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf").entry == "m-Q4_K_M.gguf"
    assert select("UD-Q4_K_M", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf").entry == "m-UD-Q4_K_M.gguf"


def test_an_ambiguous_quantization_is_refused() -> None:
    message = refusal("Q4_0", "a-Q4_0.gguf", "b-Q4_0.gguf")
    assert "'o/r' has 2 models called 'Q4_0'. Name one of a-Q4_0.gguf, b-Q4_0.gguf" in message


def test_an_unknown_file_is_answered_with_the_available_ones() -> None:
    message = refusal("Q4_K_N", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    assert "has no 'Q4_K_N', but Q4_K_M, Q8_0. Did you mean 'Q4_K_M'?" in message
    assert "has no 'Q4_0', but no GGUF files at all" in refusal("Q4_0", "model.safetensors", *SMALL)


@pytest.mark.parametrize("requested", [None, "Q8_0", SPLIT[0], SPLIT[2]])
def test_all_parts_of_a_split_model_are_chosen(requested: str | None) -> None:
    choice = select(requested, *reversed(SPLIT))
    assert names(choice) == list(SPLIT)
    assert choice.entry == SPLIT[0]


def test_a_split_model_with_a_part_missing_is_refused() -> None:
    assert "lacks some of the parts" in refusal("Q8_0", *SPLIT[:2])
    assert select(None, *SPLIT[1:], "m-F16.gguf").entry == "m-F16.gguf"


def test_only_needed_files_of_a_safetensors_repository_are_chosen() -> None:
    files = repo(*SMALL, "chat_template.jinja", "model.safetensors", "vocab.json", *NOISE)
    choice = choose_files(HubName("o/r"), files)
    assert names(choice) == [*SMALL, "chat_template.jinja"]
    with_weights = add_weights(choice, None, files)
    assert names(with_weights) == [*SMALL, "chat_template.jinja", "model.safetensors"]
    assert with_weights.entry is None


def test_the_index_says_which_shards_are_fetched() -> None:
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = "model.safetensors.index.json"
    files = repo(*SMALL, index, *parts, "consolidated.safetensors")
    choice = choose_files(HubName("o/r"), files)
    weights = {"weight_map": {"a": parts[0], "b": parts[1], "c": parts[0]}}
    assert names(add_weights(choice, weights, files)) == [*SMALL, index, *parts]
    with pytest.raises(ModelFormatError, match=r"names 'none\.safetensors', which does not exist"):
        add_weights(choice, {"weight_map": {"a": "none.safetensors"}}, files)
    with pytest.raises(ModelFormatError, match=r"names 'config\.json'"):
        add_weights(choice, {"weight_map": {"a": "config.json"}}, files)
    for nothing in ({}, {"weight_map": []}, {"weight_map": {}}):
        with pytest.raises(ModelFormatError, match="no weight_map"):
            add_weights(choice, nothing, files)


def test_a_repository_with_both_formats_gives_the_requested_one() -> None:
    both = (*SMALL, "model.safetensors", "m-Q4_0.gguf")
    assert select(None, *both).entry == "m-Q4_0.gguf"
    assert "GGUF and safetensors" in (select(None, *both).note or "")
    assert names(select("safetensors", *both)) == list(SMALL)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ((*SMALL, "pytorch_model.bin"), "PyTorch checkpoints are not read: they can run code"),
        (("README.md",), "neither a GGUF file nor model.safetensors"),
        (("model.safetensors", "tokenizer.json"), "has no config.json"),
        (("model.safetensors", "config.json", "tokenizer.model"), "has no tokenizer.json"),
        ((), "neither a GGUF file nor"),
    ],
)
def test_a_repository_without_readable_weights_is_refused(
    paths: tuple[str, ...], expected: str
) -> None:
    message = refusal(None, *paths)
    assert expected in message
