"""The head of a Hugging Face language model in chunks: exactly the model's own loss, or honestly not in chunks."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wholebatch as wb
from oracle.one_pass import distance, gradient_in_one_pass
from wholebatch.loss.head import LEAST_LOGITS, Head, head_of

ROWS, LENGTH, VOCABULARY, IGNORED = 6, 12, 37, -100
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def every_size_is_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "worthwhile", lambda head, labels: True)


def batch() -> Batch:
    """Padded rows; prompts have no label."""
    mask = (torch.arange(LENGTH) < torch.tensor([12, 5, 9, 3, 12, 7])[:, None]).long()
    ids = torch.randint(3, VOCABULARY, mask.shape) * mask
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :2] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# ---- Models ----


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=20, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1, **options))


def llama_tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def gemma2() -> nn.Module:
    """With a soft cap so low that it bends the logits of a fresh model."""
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=8, sliding_window=16, final_logit_softcapping=0.5
    )
    return transformers.Gemma2ForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **ENCODER))


def roberta() -> nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, **ENCODER))


def peft() -> nn.Module:
    """Its adapters are trained, its head is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.0))


def granite() -> nn.Module:
    return transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SIZES, num_key_value_heads=1, logits_scaling=1.5)
    )


def cohere() -> nn.Module:
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, num_key_value_heads=1, logit_scale=0.25))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=1, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.001
    )
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def unknown_cap() -> nn.Module:
    """A soft cap that the configuration does not tell of, far above a fresh model's logits."""

    class CappedForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, **fields: Any) -> Any:
            labels = fields.pop("labels", None)
            output = super().forward(**fields)
            output["logits"] = 30.0 * torch.tanh(output["logits"] / 30.0)
            if labels is not None:
                output["loss"] = self.loss_function(output["logits"], labels, vocab_size=VOCABULARY)
            return output

    return CappedForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def zero_head() -> nn.Module:
    """As `unknown_cap`, and its logits are all zero: no value tells."""
    model = unknown_cap()
    nn.init.zeros_(model.lm_head.weight)
    return model


def smoothed() -> nn.Module:
    model = llama()

    def loss_function(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.01)

    model.loss_function = loss_function
    return model


def lora_head() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(target_modules=["lm_head"], init_lora_weights=False))


def hooked() -> nn.Module:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, arguments, output: 2 * output)
    return model


def without_labels_another() -> nn.Module:
    class AnotherForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, **fields: Any) -> Any:
            if fields.get("labels") is None:
                fields["attention_mask"] = torch.ones_like(fields["input_ids"])
                fields["input_ids"] = fields["input_ids"].flip(1)
            return super().forward(**fields)

    return AnotherForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def classifier() -> nn.Module:
    return transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, **ENCODER, num_labels=VOCABULARY))


CHUNKED = [gpt2, llama, llama_tied, gemma2, bert, roberta, peft]
NOT_CHUNKED = {
    granite: "not the plain cross-entropy",
    cohere: "not the plain cross-entropy",
    mixtral: "a part that does not come from its logits",
    unknown_cap: "not the plain cross-entropy",
    zero_head: "not the plain cross-entropy",
    smoothed: "not the plain cross-entropy",
    lora_head: "no plain nn.Linear",
    hooked: "the model's head has hooks",
    without_labels_another: "something else when it is given no labels",
    t5: "encoder-decoder",
    classifier: "no plain nn.Linear",
}
"""And the reason that is given."""


def made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return build().to(dtype).train()


def accumulated(model: nn.Module, data: Batch, **options: Any) -> tuple[wb.GradientAccumulator, float]:
    """With micro-batches of unequal numbers of labels; warnings about what few examples say are not the matter."""
    accumulator = wb.GradientAccumulator(model, micro_batch_size=2, **options)
    report = accumulator.backward(data)
    assert report.should_step
    return accumulator, float(report.loss)


def against_one_pass(model: nn.Module, data: Batch, **options: Any) -> tuple[str, float, float]:
    """What became of the chunking, and the relative errors of the loss and of each parameter's gradient."""
    oracle = copy.deepcopy(model)
    loss = oracle(**data).loss
    right = gradient_in_one_pass(oracle, loss)
    accumulator, found = accumulated(model, data, **options)
    error = distance([p.grad for p in model.parameters()], right, floor=1e-3)
    return accumulator.loss_chunking, abs(found - float(loss.detach())) / abs(float(loss.detach())), error


# ---- Exact, or not in chunks ----


@pytest.mark.parametrize("build", CHUNKED)
def test_the_loss_in_chunks_is_the_models_own(build: Callable[[], nn.Module]) -> None:
    """In float64, against one pass of the model's own loss, which Hugging Face computes in float32."""
    chunking, loss, gradient = against_one_pass(made(build), batch())
    assert chunking == "on"
    assert loss < 1e-6
    assert gradient < 1e-5


@pytest.mark.parametrize(("build", "reason"), NOT_CHUNKED.items())
def test_another_loss_stays_the_models_own(build: Callable[[], nn.Module], reason: str) -> None:
    """What works without chunks goes on working, and why there are none is said."""
    model = made(build)
    if build is mixtral:  # refused as before: its router's balance is no mean over tokens
        with pytest.raises(wb.WholeBatchError):
            accumulated(model, batch())
        accumulator = wb.GradientAccumulator(model, micro_batch_size=ROWS)
        accumulator.backward(batch())
        chunking = accumulator.loss_chunking
    else:
        chunking, loss, gradient = against_one_pass(model, batch())
        assert loss < 1e-6
        assert gradient < 1e-5
    assert chunking.startswith("off: ")
    assert re.search(reason, chunking)


# ---- What is gained ----


class Largest(TorchDispatchMode):
    """Sees how often a tensor of all logits is made."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements, self.times = elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.times += sum(1 for one in made if one.numel() >= self._elements and one.shape[-1:] == (401,))
        return result


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_logits_never_exist_as_a_whole(chunked: bool, evaluation: bool) -> None:
    """In training and in `evaluate`; they do without chunks, which shows that this test sees them."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(SIZES | {"vocab_size": 401, "max_position_embeddings": 80}), num_key_value_heads=1)
    )
    ids = torch.randint(3, 401, (6, 70))
    accumulator = wb.GradientAccumulator(model, micro_batch_size=3, loss_chunking=chunked)
    accumulator.backward({"input_ids": ids, "labels": ids})  # and the checks
    with Largest(3 * 69 * 401) as largest:
        if evaluation:
            accumulator.evaluate({"input_ids": ids, "labels": ids})
        else:
            accumulator.backward({"input_ids": ids, "labels": ids})
    assert (largest.times == 0) == chunked


def test_small_logits_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks gain nothing, nothing is checked and nothing is changed."""
    monkeypatch.undo()
    accumulator, _ = accumulated(made(llama), batch())
    assert accumulator.loss_chunking.startswith("not yet: ")


def test_from_which_size_on_chunks_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    wide = Head(nn.Linear(8, 2**13, device="meta"), True, None)
    labels = torch.zeros(2, LEAST_LOGITS // 2**14, dtype=torch.long)
    assert wide.worthwhile(labels)
    assert not wide.worthwhile(labels[:, 1:])
    deep = Head(nn.Linear(3 * 1024, 2**13, device="meta"), True, None)
    assert not deep.worthwhile(labels)  # the weight's second gradient would be larger than the logits
    assert Head(deep.linear.requires_grad_(False), True, None).worthwhile(labels)


# ---- Under other conditions ----


@pytest.mark.parametrize("build", [llama, bert, gemma2])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "a bfloat16 model"])
def test_in_bfloat16(build: Callable[[], nn.Module], autocast: bool) -> None:
    """As near to float64 as the model's own loss in the same precision."""
    exact = made(build)
    right = gradient_in_one_pass(exact, exact(**batch()).loss)
    errors = {}
    for chunked in (True, False):
        model = made(build, torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            accumulator, _ = accumulated(model, batch(), loss_chunking=chunked, accumulate_in_fp32=not autocast)
        assert accumulator.loss_chunking.startswith("on" if chunked else "off")
        errors[chunked] = distance([p.grad for p in model.parameters()], right)
    assert errors[True] < max(1.5 * errors[False], 0.01)


def test_with_dropout_as_the_models_own() -> None:
    """The check draws no random number of the training, and the hook none at all."""
    gradients = []
    for chunked in (True, False):
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).double().train()
        torch.manual_seed(1)
        accumulated(model, batch(), loss_chunking=chunked)
        gradients.append([p.grad for p in model.parameters()])
    assert distance(*gradients, floor=1e-3) < 1e-6


def test_a_batch_without_labels_changes_nothing() -> None:
    model = made(llama)
    accumulator, _ = accumulated(model, batch())
    model.zero_grad()
    data = batch()
    data["labels"][:] = IGNORED
    assert not accumulator.backward(data).should_step
    assert all(p.grad is None for p in model.parameters())


def test_evaluate_before_training_and_in_another_mode() -> None:
    """What was found in one mode is not believed of the other."""
    model = made(gpt2).eval()
    accumulator = wb.GradientAccumulator(model, micro_batch_size=2)
    data = batch()
    loss = model(**data).loss
    assert abs(accumulator.evaluate(data).loss - float(loss.detach())) < 1e-6 * float(loss.detach())
    kept = accumulator._loss.head
    assert kept is not None
    assert kept.due(model, batch()) is None
    assert kept.due(model.train(), batch()) is not None
    accumulator.backward(batch())
    assert kept.due(model, batch()) is None


def test_other_fields_are_another_loss() -> None:
    """A field that was not there when it was checked may change the loss."""
    model = made(llama)
    accumulator, _ = accumulated(model, batch())
    data = batch()
    data["shift_labels"] = data["labels"].roll(-2, 1)
    oracle = copy.deepcopy(model)
    right = gradient_in_one_pass(oracle, oracle(**data).loss)
    model.zero_grad()
    accumulator.backward(data)
    assert accumulator.loss_chunking.startswith("off: ")
    assert distance([p.grad for p in model.parameters()], right, floor=1e-3) < 1e-5


def test_losses_that_are_not_finite_decide_nothing() -> None:
    model = made(llama)
    accumulator = wb.GradientAccumulator(model, micro_batch_size=2)
    weight = model.lm_head.weight.detach()
    kept = weight.clone()
    weight.fill_(float("nan"))
    assert not accumulator.backward(batch()).should_step
    assert accumulator.loss_chunking.startswith("not yet")
    weight.copy_(kept)
    assert accumulator.backward(batch()).should_step
    assert accumulator.loss_chunking == "on"


def test_the_hooks_are_gone_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(llama)
    accumulator, _ = accumulated(model, batch())

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.norm, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accumulator.backward(batch())
    assert not model.lm_head._forward_pre_hooks
    assert not model.lm_head._forward_hooks


def test_a_compiled_model_is_left_alone() -> None:
    model = made(llama)
    assert isinstance(head_of(model), Head)
    assert "wrapped in OptimizedModule" in str(head_of(torch.compile(model, backend="eager")))
    model.compile(backend="eager")
    assert head_of(model) == "the model is compiled"


def test_a_loss_fn_of_ones_own_computes_the_loss() -> None:
    accumulator = wb.GradientAccumulator(made(llama), lambda model, data: model(**data).loss, count="tokens")
    assert accumulator.loss_chunking == "off: loss_fn computes the loss"
    with pytest.raises(wb.WholeBatchError, match="loss_chunking='no'"):
        wb.GradientAccumulator(made(llama), loss_chunking="no")  # type: ignore[arg-type]


def test_where_memory_is_short_the_model_computes_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("wholebatch.head_check.HeadProbe", short)
    accumulator, _ = accumulated(made(llama), batch())
    assert accumulator.loss_chunking == "off: there was too little memory to compare it with the model's own loss"


def test_long_examples_are_shortened_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.head_check.MOST_LOGITS", 2 * 5 * VOCABULARY)
    lengths: list[int] = []
    model = made(llama)
    model.register_forward_pre_hook(
        lambda module, _, fields: lengths.append(fields["input_ids"].shape[1]), with_kwargs=True
    )
    accumulator, _ = accumulated(model, batch())
    assert accumulator.loss_chunking == "on"
    assert 5 in lengths


def test_the_denominator_is_still_seen() -> None:
    """A count that turns out wrong in a later batch is refused as without chunks."""
    accumulator = wb.GradientAccumulator(made(llama), micro_batch_size=2, count="tokens")
    data = {name: field[:2] for name, field in batch().items()}
    accumulator.backward(data)
    term = accumulator._loss(accumulator.model, data, {"loss": 1.0}, 2).terms["loss"]
    assert term.shown is not None
    assert float(term.shown) == float((data["labels"][:, 1:] != IGNORED).sum())
