"""Routers: which label suits a prompt, told from a vector of it. Numpy only; vectors come from ``models.encoders``.

A router reads the prompt once and never learns from what its choice earned. It is the baseline of the literature (a
fine-tuned BERT, cosine to centroids: MetaSD, arXiv 2604.05417; HedgeSpec, arXiv 2510.20064, on how a changed prompt
misroutes it), and a start for a bandit that does learn: see ``policies/routed.py``. Two kinds, both linear:

- *centroids*: ``cos(x - m, c_l)``, where m is the mean of the labels' means and c_l the mean direction of a label's
  vectors from there. Without m all cosines of hidden states are near 1 (a common direction dominates them; Mu and
  Viswanath 2018, "All-but-the-Top");
- *softmax*: multinomial logistic regression on standardised vectors with an L2 penalty, every label counting alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metasd_langchain.errors import BadOption, BadRouter, UnknownName

__all__ = ["ENCODERS", "Router", "fit_centroids", "fit_softmax", "load_router", "save_router"]

# What a vector is made from; see models.encoders.
ENCODERS: Mapping[str, str] = {
    "minilm": "sentence embedding of the prompt's text by all-MiniLM-L6-v2 (the demo extra)",
    "hidden-mean": "the target's last hidden states, mean over the prompt; known once the prompt is read",
    "hidden-last": "the target's last hidden state at the prompt's end; known once the prompt is read",
}
_FORMAT = "metasd-router 1"
_KINDS = ("centroids", "softmax")
_ARRAYS = ("center", "scale", "weights", "bias")
_SHARP = 10.0  # cosines to log-odds: two that differ by 0.1 are e to one
_STEPS, _STILL = 3000, 1e-6  # of the descent; gradient at which it ends
_SMALL = 1e-9
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Router:
    """A fitted router: ``scores = softmax(weights @ z + bias)``, z the vector less ``center`` times ``scale``.

    Attributes:
        kind: "centroids" (z is brought to length one) or "softmax".
        labels: what can be told apart, in the order of the scores.
        encoder: what its vectors are made from, a name of ENCODERS; "" when the caller knows.
        center, scale: ``[size]``.
        weights: ``[labels, size]``.
        bias: ``[labels]``.
    """

    kind: str
    labels: tuple[str, ...]
    encoder: str
    center: _Numbers
    scale: _Numbers
    weights: _Numbers
    bias: _Numbers

    def __repr__(self) -> str:
        """Tells routers of different numbers apart, since options of a policy are compared by it."""
        return f"Router({self.kind!r}, {self.labels}, {self.encoder!r}, {self.digest})"

    @property
    def digest(self) -> str:
        """A hash of all it holds."""
        whole = hashlib.blake2s(json.dumps([self.kind, self.labels, self.encoder]).encode(), digest_size=6)
        for array in (self.center, self.scale, self.weights, self.bias):
            whole.update(np.ascontiguousarray(array).tobytes())
        return whole.hexdigest()

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return len(self.center)

    def scores(self, vector: ArrayLike) -> _Numbers:
        """Probabilities of the labels, ``[labels]``, sum 1. A vector with nan gives equal ones.

        Raises:
            BadOption: a vector of another size.
        """
        x = np.asarray(vector, dtype=np.float64)
        if x.shape != self.center.shape:
            raise BadOption("vector", x.shape, f"{self.size} numbers, as this router was fitted to")
        z = (x - self.center) * self.scale
        if self.kind == "centroids":
            z = z / max(float(np.linalg.norm(z)), _SMALL)
        logits = self.weights @ z + self.bias
        if not np.isfinite(logits).all():
            return np.full(len(self.labels), 1.0 / len(self.labels))
        return _softmax(logits)

    def label(self, vector: ArrayLike) -> str:
        """The likeliest label; of equal ones the first."""
        return self.labels[int(self.scores(vector).argmax())]


def fit_centroids(vectors: ArrayLike, labels: Sequence[str], encoder: str = "") -> Router:
    """Cosine to the labels' mean directions.

    Args:
        vectors: ``[n, size]``.
        labels: of each row; at least two different ones.
        encoder: what the vectors were made from.

    Raises:
        BadOption: shapes that do not fit, a single label, numbers that are not finite.
        UnknownName: no such encoder.
    """
    x, names, places = _checked(vectors, labels, encoder)
    center = np.mean([x[places == at].mean(0) for at in range(len(names))], axis=0)
    units = _units(x - center)
    directions = _units(np.stack([units[places == at].mean(0) for at in range(len(names))]))
    return Router("centroids", names, encoder, center, np.ones_like(center), _SHARP * directions, np.zeros(len(names)))


def fit_softmax(vectors: ArrayLike, labels: Sequence[str], encoder: str = "", penalty: float = 0.1) -> Router:
    """Multinomial logistic regression by accelerated gradient descent (Nesterov 1983); deterministic.

    Args:
        vectors: ``[n, size]``.
        labels: of each row; at least two different ones.
        encoder: what the vectors were made from.
        penalty: half of it times the squared weights is added to the mean loss; above 0.

    Raises:
        BadOption: as `fit_centroids`, and a penalty that is not above 0.
        UnknownName: no such encoder.
    """
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not 0.0 < penalty < np.inf:
        raise BadOption("penalty", penalty, "a number above 0")
    x, names, places = _checked(vectors, labels, encoder)
    center = np.mean([x[places == at].mean(0) for at in range(len(names))], axis=0)
    spread = x.std(0)
    scale = np.where(spread > _SMALL, 1.0 / np.maximum(spread, _SMALL), 0.0)
    z = np.hstack([(x - center) * scale, np.ones((len(x), 1))])
    truth = np.eye(len(names))[places]
    share = 1.0 / (len(names) * truth.sum(0)[places])  # rows of every label weigh the same together
    found = _descend(z, truth, share, penalty)
    return Router("softmax", names, encoder, center, scale, found[:, :-1].copy(), found[:, -1].copy())


def save_router(router: Router, path: str | os.PathLike[str]) -> None:
    """Write a router to one file, whole or not at all.

    Raises:
        BadRouter: it cannot be written.
    """
    place = Path(path)
    about = {"format": _FORMAT, "kind": router.kind, "labels": list(router.labels), "encoder": router.encoder}
    unfinished = place.with_name(place.name + ".part")
    try:
        with unfinished.open("wb") as file:
            arrays = {name: getattr(router, name).astype(np.float32) for name in _ARRAYS}
            np.savez(file, about=np.array(json.dumps(about)), **arrays)
        unfinished.replace(place)
    except OSError as cause:
        unfinished.unlink(missing_ok=True)
        raise BadRouter(place.name, "", f"cannot be written ({cause.strerror})") from cause


def load_router(path: str | os.PathLike[str]) -> Router:
    """Read what `save_router` wrote.

    Raises:
        BadRouter: no such file; truncated, foreign or of a newer format; names what is wrong in it.
    """
    place = Path(path)
    try:
        # opened here: numpy leaves a file that it cannot read open
        with place.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            about: Any = json.loads(str(stored["about"]))
            arrays = {name: np.asarray(stored[name], dtype=np.float64) for name in _ARRAYS}
    except FileNotFoundError as cause:
        raise BadRouter(place.name, "", "there is no such file") from cause
    except KeyError as cause:
        raise BadRouter(place.name, "", "is no router", hint="write one with save_router") from cause
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as cause:
        raise BadRouter(place.name, "", f"is truncated or no router ({type(cause).__name__})") from cause
    return _read(place.name, about, arrays)


def _read(file: str, about: Any, arrays: Mapping[str, _Numbers]) -> Router:
    said = about.get("format") if isinstance(about, dict) else None
    if said != _FORMAT:
        raise BadRouter(file, "format", f"is {said!r}, this version reads {_FORMAT!r}")
    labels, kind, encoder = about.get("labels"), about.get("kind"), about.get("encoder")
    if kind not in _KINDS:
        raise BadRouter(file, "kind", f"is {kind!r}, not one of {', '.join(_KINDS)}")
    if not isinstance(labels, list) or len(labels) < 2 or not all(isinstance(label, str) for label in labels):
        raise BadRouter(file, "labels", "is not a list of at least two names")
    if encoder not in ("", *ENCODERS):
        raise BadRouter(file, "encoder", f"is {encoder!r}, not one of {', '.join(ENCODERS)}")
    size = arrays["center"].size
    shapes = {"center": (size,), "scale": (size,), "weights": (len(labels), size), "bias": (len(labels),)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise BadRouter(file, name, f"has shape {arrays[name].shape}, not {shape}")
        if not np.isfinite(arrays[name]).all():
            raise BadRouter(file, name, "holds numbers that are not finite")
    return Router(kind, tuple(labels), encoder, **arrays)


def _checked(vectors: ArrayLike, labels: Sequence[str], encoder: str) -> tuple[_Numbers, tuple[str, ...], Any]:
    """Rows, labels in the order in which they came, and each row's place among them."""
    if encoder not in ("", *ENCODERS):
        raise UnknownName("encoder", encoder, ENCODERS)
    x = np.asarray(vectors, dtype=np.float64)
    if x.ndim != 2 or len(x) != len(labels) or not x.size:
        raise BadOption("vectors", x.shape, f"{len(labels)} rows of numbers, one a label")
    if not np.isfinite(x).all():
        raise BadOption("vectors", "nan or inf", "finite numbers")
    names = tuple(dict.fromkeys(labels))
    if len(names) < 2:
        raise BadOption("labels", names, "at least two different ones")
    return x, names, np.array([names.index(label) for label in labels])


def _units(rows: _Numbers) -> _Numbers:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _SMALL)  # type: ignore[no-any-return]


def _softmax(logits: _Numbers) -> _Numbers:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)  # type: ignore[no-any-return]


def _descend(z: _Numbers, truth: _Numbers, share: _Numbers, penalty: float) -> _Numbers:
    """Weights ``[labels, size + 1]`` of the least penalised loss; the last column is the bias, without penalty."""
    # the loss's curvature is at most half the largest eigenvalue of the weighted second moments (Boehning 1992)
    step = 1.0 / (0.5 * float(np.linalg.norm(z * np.sqrt(share)[:, None], 2)) ** 2 + penalty)
    pulled = np.full(z.shape[1], penalty)
    pulled[-1] = 0.0
    now = ahead = np.zeros((truth.shape[1], z.shape[1]))
    for turn in range(_STEPS):
        slope = ((_softmax(z @ ahead.T) - truth) * share[:, None]).T @ z + ahead * pulled
        if float(np.abs(slope).max()) < _STILL:
            return ahead
        new = ahead - step * slope
        ahead = new + turn / (turn + 3.0) * (new - now)
        now = new
    return now
