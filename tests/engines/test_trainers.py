"""The released trainers with the callbacks that publish: what arrives, and when.

Covers: integrations/lightning.py, integrations/transformers.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from replicas import errors
from replicas.integrations.lightning import PublishCallback as LightningPublish
from replicas.integrations.transformers import PublishCallback
from replicas.integrations.weight_sync import Wait
from replicas.sources import hf
from tests.engines.programs.listener import Listener, listening

Weights = dict[str, torch.Tensor]
SAMPLES = [
    {"input_ids": [(i + k) % 64 for k in range(8)], "labels": [(i + k) % 64 for k in range(8)]} for i in range(16)
]


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def same(left: Weights, right: Weights) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


class Recorder(TrainerCallback):
    """The model's weights by step, as they are when the step is over."""

    def __init__(self) -> None:
        self.weights: dict[int, Weights] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.weights[state.global_step] = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def trainer(folder: Path, *callbacks: Any, steps: int, **options: Any) -> Any:
    options = {"save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, **options}
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=2, **options,
    )  # fmt: skip
    data = Dataset.from_list(SAMPLES)
    return Trainer(model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Recorder(), *callbacks])


def recorded(made: Any) -> dict[int, Weights]:
    found: Recorder = next(one for one in made.callback_handler.callbacks if isinstance(one, Recorder))
    return found.weights


def assert_arrived(listener: Listener, weights: dict[int, Weights], steps: list[int]) -> None:
    """All versions in order, each with the bytes that the model had at that step."""
    assert listener.steps == steps
    numbers = [number for number, _, _ in listener.versions]
    assert numbers == sorted(set(numbers))
    assert all(same(found, weights[meta["step"]]) for _, meta, found in listener.versions)
    assert not same(weights[steps[0]], weights[steps[-1]])


def test_each_step_of_a_trainer_arrives_and_its_figures_are_logged(tmp_path: Path) -> None:
    with listening() as listener:
        callback = PublishCallback(wait="loaded", **listener.where)
        made = trainer(tmp_path, callback, steps=4)
        made.train()
        assert callback.channel is None
        assert_arrived(listener, recorded(made), [0, 1, 2, 3, 4])
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["replicas/version"] for entry in logged] == [2.0, 3.0, 4.0, 5.0]
    wanted = {"replicas/seconds", "replicas/copied_seconds", "replicas/waited_seconds", "replicas/nbytes"}
    assert all(wanted <= entry.keys() for entry in logged)


@pytest.mark.parametrize("wait", ["committed", None])
def test_every_second_step_and_the_last_one(tmp_path: Path, wait: Wait) -> None:
    with listening(slots=8) as listener:
        callback = PublishCallback(every=2, wait=wait, first=False, **listener.where)
        made = trainer(tmp_path, callback, steps=5, gradient_accumulation_steps=2)
        made.train()
        last = listener.wait_for(5)
        assert same(last, recorded(made)[5])
        assert set(listener.steps) <= {2, 4, 5}
        assert all(same(found, recorded(made)[meta["step"]]) for _, meta, found in listener.versions)
    versions = [entry["replicas/version"] for entry in made.state.log_history if "replicas/version" in entry]
    assert versions[-1] == 3.0


def test_a_resumed_training_goes_on_with_the_next_versions(tmp_path: Path) -> None:
    with listening() as listener:
        callback = PublishCallback(wait="loaded", **listener.where)
        first = trainer(tmp_path, callback, steps=2, save_strategy="steps", save_steps=2)
        first.train()
        again = trainer(tmp_path, PublishCallback(wait="loaded", **listener.where), steps=4)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert_arrived(listener, recorded(first) | recorded(again), [0, 1, 2, 2, 3, 4])
        assert same(recorded(first)[2], recorded(again)[2])


def test_training_goes_on_while_no_publish_succeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening(min_targets=2, on_lost="raise") as listener, caplog.at_level(logging.WARNING, "replicas"):
        made = trainer(tmp_path, PublishCallback(wait="loaded", deadline=0.3, **listener.where), steps=3)
        made.train()
        assert made.state.global_step == 3
        assert listener.versions == []
    assert "training goes on" in caplog.text
    assert sum(entry.get("replicas/failed", 0.0) for entry in made.state.log_history) == 4.0


def test_the_best_model_is_what_is_published_last(tmp_path: Path) -> None:
    with listening() as listener:
        made = trainer(
            tmp_path, PublishCallback(wait="loaded", **listener.where), steps=3, learning_rate=10.0,
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        )  # fmt: skip
        losses, evaluate = iter((1.0, 2.0, 3.0)), made.evaluate
        made.evaluate = lambda *args, **options: {**evaluate(*args, **options), "eval_loss": next(losses)}
        made.train()
        assert listener.steps == [0, 1, 2, 3, 3]
        best = int(made.state.best_model_checkpoint.rpartition("-")[2])
        assert best == 1
        assert same(listener.versions[-1][2], recorded(made)[best])


def test_a_group_that_is_no_source_is_told_when_training_begins(tmp_path: Path) -> None:
    with listening() as listener:
        made = trainer(tmp_path, PublishCallback(**{**listener.where, "group": "rollout", "replica": 1}), steps=1)
        with pytest.raises(errors.UsageError, match="rollout/1/0 is a target"):
            made.train()


def test_a_step_that_raises_leaves_a_channel_that_can_be_used_again(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        raised = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and not self.raised:
                self.raised = True
                raise RuntimeError("the batch is bad")

    with listening() as listener:
        made = trainer(tmp_path, PublishCallback(wait="loaded", **listener.where), Once(), steps=2)
        with pytest.raises(RuntimeError, match="the batch is bad"):
            made.train()
        made.train()
        assert listener.steps == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1.5}, {"wait": "sent"}])
def test_a_wrong_argument_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match="pass"):
        PublishCallback(**wrong)
    with pytest.raises(errors.UsageError, match="pass"):
        LightningPublish(**wrong)


class Module(LightningModule):
    """The model under an attribute, as users hold it; its weights by step."""

    def __init__(self, *, fail_at: int = -1) -> None:
        super().__init__()
        self.model = model()
        self.weights: dict[int, Weights] = {}
        self.fail_at = fail_at

    def record(self) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.weights.setdefault(self.global_step, weights)

    def training_step(self, batch: Any, _: int) -> Any:
        if self.global_step == self.fail_at:
            raise RuntimeError("the batch is bad")
        return self.model(**batch).loss

    def on_train_start(self) -> None:
        self.record()

    def on_train_batch_end(self, *_: Any) -> None:
        self.record()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


def lightning(folder: Path, callback: Any, steps: int, **options: Any) -> Any:
    return LightningTrainer(
        default_root_dir=folder, max_steps=steps, accelerator="cpu", callbacks=[callback], log_every_n_steps=1,
        logger=CSVLogger(folder), enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def batches() -> Any:
    data: Any = [{name: torch.tensor(ids) for name, ids in sample.items()} for sample in SAMPLES]
    return DataLoader(data, batch_size=2)


def of_model(module: Any) -> Any:
    return hf(module.model)


def test_each_optimizer_step_of_lightning_arrives_and_its_figures_are_logged(tmp_path: Path) -> None:
    with listening() as listener:
        callback = LightningPublish(wait="loaded", weights=of_model, **listener.where)
        module, made = Module(), lightning(tmp_path, callback, 3, accumulate_grad_batches=2)
        made.fit(module, batches())
        assert callback.channel is None
        assert_arrived(listener, module.weights, [0, 1, 2, 3])
    rows = (Path(made.logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("replicas/version")
    assert {row.split(",")[column] for row in rows[1:]} >= {"1.0", "2.0", "3.0", "4.0"}


@pytest.mark.parametrize("first", [True, False])
def test_lightning_is_refused_at_its_start_with_the_weights_that_work(tmp_path: Path, first: bool) -> None:
    with listening() as listener:
        callback = LightningPublish(first=first, **listener.where)
        text = r"the Module holds a LlamaForCausalLM as \.model.*weights=lambda module: hf\(module\.model\)"
        module = Module()
        with pytest.raises(errors.UsageError, match=text):
            lightning(tmp_path, callback, 2).fit(module, batches())
        assert module.global_step == 0
        assert callback.channel is None
        assert listener.versions == []


class Plain(LightningModule):
    """A module without a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch["input_ids"].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_a_module_of_lightning_is_published_under_its_own_names(tmp_path: Path) -> None:
    with listening() as listener:
        module = Plain()
        lightning(tmp_path, LightningPublish(wait="loaded", **listener.where), 2).fit(module, batches())
        assert listener.steps == [0, 1, 2]
        assert same(listener.versions[-1][2], module.state_dict())


class Wrapped(torch.nn.Module):
    """As a value head of TRL's around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_trainer_of_a_wrapper_is_refused_at_its_start(tmp_path: Path) -> None:
    with listening() as listener:
        made = trainer(tmp_path, PublishCallback(**listener.where), steps=1)
        made.model = made.model_wrapped = Wrapped()
        with pytest.raises(errors.UsageError, match=r"weights=lambda module: hf\(module\.inner\)"):
            made.train()
        assert listener.versions == []


def test_a_resumed_lightning_goes_on_with_the_next_versions(tmp_path: Path) -> None:
    with listening() as listener:
        options: dict[str, Any] = {"wait": "loaded", "weights": of_model, **listener.where}
        module, made = Module(), lightning(tmp_path, LightningPublish(every=2, **options), 3)
        made.fit(module, batches())
        again = Module()
        saved = made.checkpoint_callback.best_model_path
        lightning(tmp_path, LightningPublish(every=2, **options), 5).fit(again, batches(), ckpt_path=saved)
        assert_arrived(listener, module.weights | again.weights, [0, 2, 3, 3, 4, 5])


def test_lightning_that_fails_leaves_the_channel(tmp_path: Path) -> None:
    with listening() as listener:
        callback = LightningPublish(wait="loaded", weights=of_model, **listener.where)
        with pytest.raises(RuntimeError, match="the batch is bad"):
            lightning(tmp_path, callback, 3).fit(Module(fail_at=1), batches())
        assert callback.channel is None
        assert listener.steps == [0, 1]
