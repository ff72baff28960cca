"""Callbacks that request, fail, sleep and draw; named in train.callbacks as tests.training.own_callbacks:Name."""

import json
import random
import sys
import time

import numpy as np
import torch

from hpclm.training.callbacks import Callback


class Notes(Callback):
    """Writes down what it is called with."""

    def note(self, *values):
        with (self.out / "notes.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def after_step(self, step, metrics):
        self.note(step, metrics)
        metrics.clear()

    def after_evaluation(self, step, losses):
        self.note(step, losses)


class Stops(Callback):
    def after_step(self, step, metrics):
        return "stop" if step == 5 else None


class Saves(Callback):
    def after_step(self, step, metrics):
        return "save" if step == 5 else None


class StopsByLoss(Callback):
    def after_evaluation(self, step, losses):
        return "stop" if step == 6 and losses["valid"] > 0 else None


class SavesByLoss(Callback):
    def after_evaluation(self, step, losses):
        return "save" if step == 6 else None


class Breaks(Callback):
    def after_step(self, step, metrics):
        if step == 5:
            raise RuntimeError("no\nway")


class MayBreak(Breaks):
    optional = True


class Exits(Callback):
    def after_step(self, step, metrics):
        if step == 5:
            sys.exit()


class Halts(Callback):
    def after_step(self, step, metrics):
        return "halt" if step == 5 else None


class CannotBeMade(Callback):
    def __init__(self, out):
        raise OSError("no room")


class MayNotBeMade(CannotBeMade):
    optional = True


class Sleeps(Callback):
    def after_step(self, step, metrics):
        if step == 5:
            time.sleep(0.5)


class Draws(Callback):
    def after_step(self, step, metrics):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(step)
        torch.rand(3)


class Misspelt(Callback):
    def after_eval(self, step, losses):
        pass


class LacksMetrics(Callback):
    def after_step(self, step):
        pass


class TakesMore(Callback):
    def __init__(self, out, patience):
        pass


class Unrelated:
    def after_step(self, step, metrics):
        pass
