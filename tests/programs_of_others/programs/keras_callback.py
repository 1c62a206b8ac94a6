import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from tests.programs_of_others.training import ROOT, reached, report

keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(0)
try:
    model = keras.saving.load_model(ROOT)
    start = int(model.optimizer.iterations)
except ValueError:
    # Keras does not find the weights of a Sequential again: their paths are others later.
    given = keras.Input((8,))
    model = keras.Model(given, keras.layers.Dense(1)(keras.layers.Dense(16)(given)))
    model.compile(optimizer="adam", loss="mse")
    start = 0

losses = {}


class Losses(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        reached(epoch)

    def on_epoch_end(self, epoch, logs=None):
        losses[epoch] = logs["loss"]


features = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
model.fit(
    features,
    features.sum(axis=1),
    batch_size=8,
    shuffle=False,
    initial_epoch=start,
    epochs=8,
    verbose=0,
    callbacks=[Losses(), keras.callbacks.OrbaxCheckpoint(ROOT, max_to_keep=3)],
)
report(start, losses, model.get_state_tree()["trainable_variables"])
