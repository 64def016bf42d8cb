"""Documents end to end in full contexts: what is predicted, what sees what, and how a run of them goes on."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import wholebatch as wb
from wholebatch.errors import ConfigurationError
from wholebatch.training import loop, recipe
from wholebatch.training.data import Corpus, load_corpus, python_documentation, train_tokenizer, unigram_entropy
from wholebatch.training.documents import Document
from wholebatch.training.model import keeps_documents_apart
from wholebatch.training.objectives import NO_LABEL, CausalLM, Example
from wholebatch.training.order import Drawn
from wholebatch.training.packing import contexts, packed
from wholebatch.training.recipe import train
from wholebatch.training.run_report import RunReport
from wholebatch.training.settings import TrainingSettings, read_toml, settings_of

TEXTS = [f"The statement number {number} binds {number % 7} names.\n" * (1 + number % 5) for number in range(60)]
TOKENIZER = train_tokenizer(TEXTS, 300)
LENGTHS = [2, 3, 7, 8, 64, 10_000]


def objective(context_length: int, **given: Any) -> CausalLM:
    return CausalLM(TOKENIZER, context_length, **given)


def pieces(context_length: int) -> list[Example]:
    return [one for text in TEXTS for one in objective(context_length).examples(Document(text))]


def documents() -> list[list[int]]:
    """Each between two ends of text."""
    end = TOKENIZER.eos_token_id
    return [[end, *TOKENIZER.encode(text), end] for text in TEXTS]


def by_hand(context_length: int) -> list[list[list[int]]]:
    """Contexts as lists of pieces of documents, each a list of tokens, made without tensors."""
    found: list[list[list[int]]] = [[]]
    for document in documents():
        while document:
            room = context_length - sum(map(len, found[-1]))
            if room == 0:
                found.append([])
                continue
            found[-1].append(document[:room])
            document = document[room:] and document[room - 1 :]
    return found


def batch_of(examples: list[Example], **given: Any) -> dict[str, Any]:
    return objective(16, packing="apart", **given).collate([Drawn(one, 0) for one in examples])


# ---- What is predicted ----


@pytest.mark.parametrize("context_length", LENGTHS)
def test_contexts_are_full_and_hold_the_documents_in_order(context_length: int) -> None:
    examples = list(contexts(pieces(context_length), context_length))
    assert [one.ids.tolist() for one in examples] == [
        list(itertools.chain(*context)) for context in by_hand(context_length)
    ]
    assert {len(one.ids) for one in examples[:-1]} <= {context_length}
    assert all(len(one.ids) >= 2 for one in examples)


@pytest.mark.parametrize("context_length", LENGTHS)
def test_every_token_but_the_first_of_a_document_is_predicted_exactly_once(context_length: int) -> None:
    """In order, whether packed or not; and as many of them, so that an epoch is the same."""
    expected = [token for document in documents() for token in document[1:]]
    for examples in (pieces(context_length), list(contexts(pieces(context_length), context_length))):
        labels = batch_of(examples)["labels"][:, 1:]
        assert labels[labels != NO_LABEL].tolist() == expected


@pytest.mark.parametrize("context_length", LENGTHS)
def test_positions_begin_anew_with_each_piece_of_a_document(context_length: int) -> None:
    examples = list(contexts(pieces(context_length), context_length))
    batch = batch_of(examples)
    for row, context in zip(batch["position_ids"].tolist(), by_hand(context_length), strict=True):
        expected = [place for piece in context for place in range(len(piece))]
        assert row[: len(expected)] == expected
        assert len(row) == batch["input_ids"].shape[1]
        assert row[len(expected) :] == list(range(len(piece := context[-1]), len(piece) + len(row) - len(expected)))


def test_little_is_wasted_on_pythons_documentation() -> None:
    settings = TrainingSettings()
    corpus = packed(load_corpus(map(Document, python_documentation()), settings), "apart")
    assert corpus.known
    tokens = sum(len(one.ids) for one in corpus.known)
    assert tokens / (len(corpus.known) * settings.context_length) >= 0.99


# ---- The corpus ----


def corpus_of(**given: Any) -> Corpus:
    settings = TrainingSettings(**({"context_length": 16, "vocabulary_size": 300} | given))
    return load_corpus([Document(text) for text in TEXTS], settings)


def test_only_what_is_learned_from_is_packed() -> None:
    corpus = corpus_of()
    found = packed(corpus, "apart")
    assert found.known
    assert found.validation is corpus.validation
    assert (found.guess_value, found.fingerprint) == (corpus.guess_value, corpus.fingerprint)
    assert (corpus.objective.packing, found.objective.packing) == ("off", "apart")
    assert packed(corpus, "off") is corpus


def test_the_unigram_entropy_is_over_what_is_predicted() -> None:
    """From the labels of the packed contexts; a token before them, as the first is none to predict."""
    corpus = packed(corpus_of(), "apart")
    labels = corpus.objective.collate([Drawn(one, 0) for one in corpus.train])["labels"][:, 1:]
    seen = labels[labels != NO_LABEL]
    entropy = unigram_entropy(
        [torch.cat([torch.tensor([0]), seen])], (one.ids for one in corpus.validation), len(corpus.objective.tokenizer)
    )
    assert corpus.guess_value == pytest.approx(entropy, rel=1e-12)


def test_a_stream_is_packed_as_it_comes() -> None:
    """The same contexts as in memory, each time it is gone through."""
    whole = packed(corpus_of(), "apart")
    stream = packed(corpus_of(streaming=True, max_steps=1, data=("somewhere",)), "apart")
    assert stream.known is None
    for _ in range(2):
        for one, other in zip(stream.train, whole.train, strict=True):
            assert torch.equal(one.ids, other.ids)
            assert one.starts == other.starts


# ---- What sees what ----


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def piece_by_piece(model: nn.Module, found: list[list[list[int]]]) -> tuple[float, Tensor]:
    """Mean loss and gradient over all predicted tokens, each piece of a document by itself, without positions."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for piece in (torch.tensor(piece) for context in found for piece in context if len(piece) > 1):
        logits = model(input_ids=piece[None]).logits[0, :-1]
        total, count = total + cross_entropy(logits, piece[1:], reduction="sum"), count + len(piece) - 1
    (total / count).backward()
    return float(total.detach()) / count, gradients(model)


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 7])
def test_packed_documents_have_the_loss_and_gradient_of_each_by_itself(build: Any, micro_batch_size: int) -> None:
    """The last context is short, so there is padding too."""
    torch.manual_seed(0)
    model = build().double()
    found, examples = by_hand(32)[-7:], list(contexts(pieces(32), 32))[-7:]
    assert len(examples[-1].ids) < 32
    assert sum(map(len, found)) > 1.5 * len(found)
    loss, gradient = piece_by_piece(model, found)
    model.zero_grad()
    target = objective(32, double=True, packing="apart")
    accumulator = wb.GradientAccumulator(
        model, target.loss_fn, count=target.count, micro_batch_size=micro_batch_size, collate_fn=target.collate
    )
    report = accumulator.backward([Drawn(one, 0) for one in examples])
    assert float(report.loss) == pytest.approx(loss, rel=1e-10)
    assert float((gradients(model) - gradient).norm() / gradient.norm()) < 1e-10


def test_the_models_own_loss_is_that_of_each_by_itself() -> None:
    """In float32, up to its rounding."""
    torch.manual_seed(0)
    model = llama()
    loss, gradient = piece_by_piece(model, by_hand(16)[:5])
    model.zero_grad()
    target = objective(16, packing="apart")
    accumulator = wb.GradientAccumulator(model, micro_batch_size=2, collate_fn=target.collate)
    report = accumulator.backward([Drawn(one, 0) for one in list(contexts(pieces(16), 16))[:5]])
    assert float(report.loss) == pytest.approx(loss, rel=1e-5)
    assert float((gradients(model) - gradient).norm() / gradient.norm()) < 1e-4


def without_attention() -> nn.Module:
    """Each token is predicted from the one before it alone, so that nothing shows whether documents are kept apart."""
    model = llama()
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


class Deaf(LlamaForCausalLM):
    """Takes positions, and heeds them not."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool | None = None) -> Any:
        return super().forward(input_ids=input_ids, use_cache=use_cache)


class Cached(LlamaForCausalLM):
    """Positions begin anew, and with its cache transformers lets documents see each other all the same."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool | None = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "apart"),
    [
        (llama, True),
        (gpt2, True),
        (lambda: Deaf(llama().config), False),
        (lambda: Cached(llama().config), False),
        (without_attention, False),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)), False),
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1)), False),
    ],
    ids=["Llama", "GPT-2", "deaf", "cached", "without attention", "no positions", "recurrent"],
)
def test_whether_documents_are_kept_apart_is_found_by_trying(build: Any, apart: bool) -> None:
    torch.manual_seed(0)
    model = build().train()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    assert keeps_documents_apart(model) is apart
    assert all(module.training for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


# ---- A run ----


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run of seconds in float64, with dropout; four updates are an epoch, its last batch is smaller."""
    config = llama().config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": None}))
    lines = [f"The statement number {number} binds {number % 7} names" for number in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    return {
        "data": (str(tmp_path / "lines.txt"),),
        "documents": "line",
        "model": str(tmp_path / "config.json"),
        "context_length": 16,
        "packing": "on",
        "vocabulary_size": 300,
        "dtype": "float64",
        "dropout": 0.2,
        "global_batch_size": 7,
        "micro_batch_size": 3,
        "learning_rate": 1e-2,
        "schedule": "constant",
        "warm_up": 0.0,
        "seed": 3,
        "threads": 1,
        "output_dir": tmp_path / "run",
    }


def trained(resume: Path | None = None, **given: Any) -> tuple[RunReport, str]:
    out = io.StringIO()
    return train(TrainingSettings(**given), Console(file=out, width=120), resume), out.getvalue()


def went_on(folder: Path, **changed: Any) -> tuple[RunReport, str]:
    out = io.StringIO()
    return train(settings_of(recipe.recorded(folder), changed), Console(file=out, width=120), folder), out.getvalue()


def seen(folder: Path) -> list[tuple[float, int]]:
    """Loss and tokens of each update."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["num_tokens"]) for line in lines if line["part"] == "train"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_packed_run_that_goes_on_ends_bitwise_as_one_never_stopped(
    small: dict[str, Any], tmp_path: Path, streaming: bool
) -> None:
    """Stopped inside the second epoch, gone on with into the third."""
    small = small | {"streaming": streaming}
    trained(**small, max_steps=6)
    report, printed = went_on(tmp_path / "run", max_steps=11)
    straight, _ = trained(**small | {"output_dir": tmp_path / "straight"}, max_steps=11)
    assert "packed: yes: several documents in a context, and none sees another\n" in printed
    assert seen(tmp_path / "run") == seen(tmp_path / "straight")
    assert len({tokens for _, tokens in seen(tmp_path / "run")}) > 1
    one, other = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("run", "straight"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert report.validation_after == straight.validation_after


def test_an_epoch_predicts_as_many_tokens_packed_or_not(small: dict[str, Any], tmp_path: Path) -> None:
    """In fewer examples; and what is held out costs the same before training, to the last bit."""
    on, _ = trained(**small, epochs=1)
    off, printed = trained(**small | {"packing": "off", "output_dir": tmp_path / "off"}, epochs=1)
    assert on.updates.num_units == off.updates.num_units
    assert on.num_train_examples < off.num_train_examples
    assert on.validation_before == off.validation_before
    assert "packed" not in printed
    assert "| packing | no: each document has contexts of its own |" in (tmp_path / "off" / "report.md").read_text()


@pytest.mark.filterwarnings("ignore")
def test_documents_that_see_each_other_are_named(small: dict[str, Any], tmp_path: Path) -> None:
    config = BloomConfig(hidden_size=16, n_layer=1, n_head=2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    report, printed = trained(**small | {"dropout": 0.0}, max_steps=2)
    words = "yes, and the model cannot be told where documents begin: each sees those before it in its context"
    assert f"packed: {words}\n" in printed
    assert report.packing == words
    assert words in (tmp_path / "run" / "report.md").read_text()
    assert f"packed: {words}\n" in went_on(tmp_path / "run", max_steps=3)[1]


@pytest.mark.parametrize(
    ("given", "device", "apart", "expected"),
    [
        ({}, "cuda", True, "apart"),
        ({}, "cuda", False, "off"),
        ({}, "cpu", True, "off"),
        ({"packing": "on"}, "cpu", True, "apart"),
        ({"packing": "on"}, "cuda", False, "across"),
        ({"packing": "off"}, "cuda", True, "off"),
        ({"objective": "masked-lm"}, "cuda", True, "off"),
    ],
)
def test_auto_packs_on_a_gpu_where_documents_are_kept_apart(
    given: dict[str, Any], device: str, apart: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "keeps_documents_apart", lambda model: apart)
    assert recipe._packing(TrainingSettings(**given), nn.Identity(), torch.device(device), None) == expected


def test_a_run_begun_on_a_gpu_stays_packed_on_a_cpu(small: dict[str, Any], tmp_path: Path) -> None:
    """What `auto` came to is part of the run."""
    with pytest.MonkeyPatch.context() as patch:
        decide = recipe._packing
        patch.setattr(recipe, "_packing", lambda given, model, device, _: decide(given, model, torch.device("cuda"), _))
        first, _ = trained(**small | {"packing": "auto"}, max_steps=2)
    assert first.packing.startswith("yes")
    assert went_on(tmp_path / "run", max_steps=3)[0].packing == first.packing


def test_a_run_goes_on_packed_as_it_was(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(**small, max_steps=2)
    with pytest.raises(ConfigurationError, match=r"cannot change packing \(on there, off now\)"):
        went_on(tmp_path / "run", packing="off")
    monkeypatch.setattr(recipe, "keeps_documents_apart", lambda model: False)
    with pytest.raises(ConfigurationError, match=r"kept apart, and with transformers .* does not do so"):
        went_on(tmp_path / "run", max_steps=3)


def test_a_run_recorded_before_there_was_packing_goes_on_without(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = tmp_path / "run", loop.Training.state

    def of_before(training: loop.Training) -> dict[str, Any]:
        kept = state(training)
        del kept["packing"], kept["settings"]["packing"]
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "state", of_before)
        trained(**small | {"packing": "off"}, max_steps=2)
    lines = (folder / "run.toml").read_text().splitlines()
    (folder / "run.toml").write_text("\n".join(line for line in lines if not line.startswith("packing")))
    report, printed = went_on(folder, max_steps=5)
    assert "changed: packing" not in printed
    assert report.settings.packing == read_toml(folder / "run.toml")["packing"] == "off"
    straight, _ = trained(**small | {"packing": "off", "output_dir": tmp_path / "straight"}, max_steps=5)
    assert report.validation_after == straight.validation_after
