"""Settings for every test: hypothesis without deadlines on shared machines, torch on two threads."""

import torch
from hypothesis import settings

settings.register_profile("narrowgate", deadline=None)
settings.load_profile("narrowgate")
torch.set_num_threads(min(2, torch.get_num_threads()))
