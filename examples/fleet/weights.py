import sys

import torch
from safetensors.torch import save_file

number = sys.argv[1]
save_file({"weight": torch.full((2, 4), float(number)), "bias": torch.zeros(2)}, f"{number}.safetensors")
