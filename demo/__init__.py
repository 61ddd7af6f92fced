"""The embedded models, one for text and one for pictures: small enough to commit, good enough to be wrong only rarely.

They exist so that the engine has something real to serve, with answers that can be checked, on a
machine that has never downloaded anything. Importing this package reads no file.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
VISION_MODEL_PATH: Path = Path(__file__).resolve().parent / "vision"
