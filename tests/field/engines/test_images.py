"""What a real vLLM remembers of images: outputs of the old weights' encoder
(vllm#42695 in docs/field.md)."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedModel,
)

from replicas.integrations.vllm_verbs import VllmEngine
from tests.engines.programs.small_model import CONFIG
from tests.engines.world import MODEL
from tests.field.engines.small import ANSWER_S, Server, clear_nothing_in_a_pause, difference, server
from tests.support.field.worlds import ask

pytestmark = pytest.mark.timeout(1500)

SIDE, PATCH, SCALE = 32, 8, 2
"""Pixels of an image and of a patch along one side, and patches of a token."""
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = """{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"""
FRESH, STALE = 0.2, 0.5
"""Mean difference of log-probabilities in bfloat16: of the same computation, and of one
with an image as other weights saw it."""
_numbers = itertools.count()


def image_model(folder: Path) -> PreTrainedModel:
    """Write a small Idefics3 with random weights, and return it.

    It is one of the few whose classes need no torchvision, whose wheels bring CUDA.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config={**vision, "image_size": SIDE, "patch_size": PATCH},
        text_config=CONFIG.to_dict() | {"vocab_size": 49216, "tie_word_embeddings": False},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        scale_factor=SCALE,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokens = (SIDE // PATCH // SCALE) ** 2
    Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=TEMPLATE).save_pretrained(folder)
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("images"), written=image_model) as found:
        yield found


def next_token(vllm: Server, seed: int, name: str) -> Mapping[str, float]:
    """Log-probabilities after an image of noise and a word; no keys and values are
    remembered.

    :param name: of the image: outputs of its encoder are remembered by that.
    """
    pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}, "uuid": name}, {"type": "text", "text": "is"}]
    asked: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 5, "return_tokens_as_token_ids": True}
    asked |= {"ignore_eos": True, "cache_salt": f"{next(_numbers)}"}
    (choice,) = ask(f"{vllm.url}/v1/chat/completions", asked, timeout_s=ANSWER_S)["choices"]
    (token,) = choice["logprobs"]["content"]
    return {one["token"]: one["logprob"] for one in token["top_logprobs"]}


def fresh(vllm: Server, seed: int) -> Mapping[str, float]:
    """The same, of an image that cannot be remembered."""
    return next_token(vllm, seed, f"fresh-{next(_numbers)}")


def gaps(vllm: Server, loads: int) -> list[float]:
    """Of three images that were asked about before each load."""
    found = []
    with vllm.following():
        vllm.wait_until_served(vllm.publish())
        for _ in range(loads):
            for seed in range(3):
                next_token(vllm, seed, f"{seed}")
            vllm.wait_until_served(vllm.publish())
            found += [difference(next_token(vllm, seed, f"{seed}"), fresh(vllm, seed)) for seed in range(3)]
    return found


def test_vllm_42695_no_image_is_remembered_as_old_weights_saw_it(vllm: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same server without the reset answers from the old encoder's outputs."""
    found = gaps(vllm, 3)
    print("after each load:", found)
    assert max(found) < FRESH
    assert difference(fresh(vllm, 0), fresh(vllm, 1)) > STALE, "the model sees the images"
    post = VllmEngine.post

    def forgetful(self: VllmEngine, path: str, *more: Any, **options: Any) -> Any:
        return None if path == "/reset_encoder_cache" else post(self, path, *more, **options)

    clear_nothing_in_a_pause(monkeypatch)
    monkeypatch.setattr(VllmEngine, "post", forgetful)
    stale = gaps(vllm, 1)
    print("without a reset:", stale)
    assert max(stale) > STALE
