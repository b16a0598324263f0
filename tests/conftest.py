"""Settings of the whole suite: one compute thread, no spinning, no network, a cache of its own, an interrupt that interrupts."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where no folder is named: a server that runs on this machine holds the user's own.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="afterglow-tests-")

import hypothesis
import torch

torch.set_num_threads(1)

# How long an example takes depends on what else runs on the machine.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A shell that starts something in the background has it ignore interrupts, and whatever that starts in turn.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
