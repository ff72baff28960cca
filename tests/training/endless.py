"""An engine whose third step does not end."""

import time

from hpclm.engine.native import NativeEngine


class EndlessStep(NativeEngine):
    def train_step(self, batches, lr, step, *rest):
        if step == 2:
            time.sleep(3600)
        return super().train_step(batches, lr, step, *rest)
