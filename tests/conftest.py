"""Settings of the whole suite: one compute thread, no spinning, no network, and an interrupt that interrupts."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)

# A shell that starts something in the background has it ignore interrupts, and whatever that starts in turn.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
