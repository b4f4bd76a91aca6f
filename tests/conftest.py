"""Settings for every test: hypothesis without deadlines on shared machines; torch on one thread."""

import torch
from hypothesis import settings

settings.register_profile("narrowgate", deadline=None)
settings.load_profile("narrowgate")
# The tensors of the tests are small: a second thread gains nothing, and on a busy machine waits for its core.
torch.set_num_threads(1)
