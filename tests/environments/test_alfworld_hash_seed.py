"""Equal seeds give equal games, rewrites, experts and labels in every process: nothing follows the order of a set."""

import os
import subprocess
import sys

SCRIPT = """
import hashlib, sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld.builder import build_games

digest = hashlib.sha256()
with TemporaryDirectory() as folder:
    build_games(Path(folder) / "games", 60, sliced_share=1.0)
    environment = AlfWorldEnvironment(folder + "/games")
    for index, task in enumerate(environment.corpus("train", "in_domain")):
        digest.update(task.id.encode())
        for direction in ("harder", "easier"):
            for child in environment.vary(task, direction, Random(f"{index}/{direction}"), 1):
                digest.update(child.id.encode())
        episode, rng = environment.start(task), Random(index)
        for _ in range(15):
            expert = environment.expert(episode, rng)
            action = expert.action if rng.random() < 0.7 else rng.choice(episode.observation.commands)
            digest.update(repr((expert, episode.observation, environment.label_step(episode, action))).encode())
            if episode.step(action).done:
                break
print(digest.hexdigest())
"""


def test_nothing_depends_on_the_hash_seed():
    found = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
