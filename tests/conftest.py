"""Before anything imports Triton: without a GPU its kernels run in the interpreter."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
