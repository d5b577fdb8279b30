# python wgan_penalty.py
"""WGAN-GP on digits with a sweep of the penalty weight: loss, spread of the scores, and critic gradient per penalty.

The sweep is `python -m instrument -m +exp=wgan_gp task.penalty=0,1,10`; this script runs it and loads the results.
"""

import subprocess
import sys

import instrument

FOLDER, PENALTIES = "runs/wgan_penalty", "0,1,10"
sweep = [
    "-m",
    "instrument",
    "-m",
    "+exp=wgan_gp",
    f"task.penalty={PENALTIES}",
    f"hydra.sweep.dir={FOLDER}",
    *sys.argv[1:],
]
subprocess.run([sys.executable, *sweep], check=True)

run = instrument.load(FOLDER)
scores = run.stats[run.stats.hook == "scores"]
gradients = run.stats[run.stats.hook == "critic_gradients"]
last = scores.step.max()
table = run.metrics.query("phase == 'train'").groupby("task.penalty").loss.last().to_frame("loss")
table["score std"] = scores[scores.step == last].groupby("task.penalty")["std"].mean()
table["critic gradient"] = gradients[gradients.step == last].groupby("task.penalty").l2.max()
print(table.round(3).to_string())
