"""Tests of conversion. transformers is kept off the network and away from the user's cache."""

import atexit
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
