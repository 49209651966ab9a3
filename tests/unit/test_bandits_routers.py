"""Routers: fits on toy vectors, files, and the policy that plays or starts by them."""

import json
import math
import zipfile

import numpy as np
import pytest

from metasd_langchain.assemble import make_pool
from metasd_langchain.bandits import Encoding
from metasd_langchain.bandits.policies.hinted_ucb import HintedUCB
from metasd_langchain.bandits.policies.routed import Routed, RoutedPrior
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.bandits.routers import (
    ENCODERS,
    Router,
    fit_centroids,
    fit_softmax,
    load_router,
    save_router,
)
from metasd_langchain.errors import BadOption, BadRouter, BanditMemoryError, UnknownName
from metasd_langchain.values import PLAIN, Choice, Situation

RNG = np.random.default_rng(0)
HEADS = ("eagle-math@8", "eagle-code@8", "suffix@16", PLAIN)
MATH, CODE = np.array([1.0, 0.0]), np.array([0.0, 1.0])


def router(encoder=""):
    return fit_centroids([[1.0, 0.0], [0.0, 1.0]], ["math", "code"], encoder)


def clouds(count, seed=0, gap=2.0):
    """Three labels in eight dimensions, far from the origin in a common direction; the last has few rows."""
    rng = np.random.default_rng(seed)
    centers = 50.0 + gap * np.eye(8)[:3]
    labels = [name for name, rows in (("a", count), ("b", count), ("c", count // 4)) for _ in range(rows)]
    return np.stack([centers["abc".index(label)] + rng.standard_normal(8) for label in labels]), labels


# -- fits --------------------------------------------------------------------------------------------------------------


def test_centroids_by_hand():
    """m = (2, 2); from there a lies along (1, 0) and (0.6, 0.8), b along (-1, 0)."""
    found = fit_centroids([[3.0, 2.0], [2.6, 2.8], [0.2, 1.6]], ["a", "a", "b"])
    assert found.labels == ("a", "b")
    assert found.center == pytest.approx([1.5, 2.0])
    first, second = np.array([1.5, 0.0]), np.array([1.1, 0.8])
    direction = first / 1.5 + second / np.linalg.norm(second)
    x = np.array([1.5, 5.0])  # straight up from m
    cosines = [direction[1] / np.linalg.norm(direction), -0.4 / math.hypot(1.3, 0.4)]
    odds = math.exp(10.0 * (cosines[0] - cosines[1]))
    assert found.scores(x) == pytest.approx([odds / (1 + odds), 1 / (1 + odds)])
    assert found.label(x) == "a"


def test_softmax_is_at_the_minimum_of_its_penalised_loss():
    x, labels = clouds(40)
    found = fit_softmax(x, labels, penalty=0.05)
    z = (x - found.center) * found.scale
    places = np.array([found.labels.index(label) for label in labels])
    share = np.array([1 / (3 * labels.count(label)) for label in labels])

    def loss(weights, bias):
        logits = z @ weights.T + bias
        total = np.log(np.exp(logits).sum(1))
        return float((share * (total - logits[np.arange(len(z)), places])).sum()) + 0.025 * float((weights**2).sum())

    least = loss(found.weights, found.bias)
    rng = np.random.default_rng(1)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            moved = found.weights + size * rng.standard_normal(found.weights.shape)
            assert loss(moved, found.bias + size * rng.standard_normal(3)) > least


@pytest.mark.parametrize("fit", [fit_centroids, fit_softmax])
def test_a_fit_tells_new_vectors_apart(fit):
    found = fit(*clouds(60, gap=4.0))
    x, labels = clouds(60, seed=1, gap=4.0)
    right = {label: np.mean([found.label(v) == label for v, own in zip(x, labels, strict=True) if own == label])
             for label in "abc"}  # fmt: skip
    assert min(right.values()) > 0.85, right  # the rare label too
    scores = found.scores(x[0])
    assert scores.sum() == pytest.approx(1.0)
    assert (scores >= 0).all()


def test_a_fit_is_the_same_twice():
    assert (fit_softmax(*clouds(20)).weights == fit_softmax(*clouds(20)).weights).all()


@pytest.mark.parametrize("fit", [fit_centroids, fit_softmax])
def test_wrong_vectors_are_named(fit):
    for vectors, labels, says in (
        ([[1.0], [2.0]], ["a"], "vectors="),
        ([1.0, 2.0], ["a", "b"], "vectors="),
        (np.empty((2, 0)), ["a", "b"], "vectors="),
        ([[1.0], [math.nan]], ["a", "b"], "finite"),
        ([[1.0], [2.0]], ["a", "a"], "two different"),
    ):
        with pytest.raises(BadOption, match=says):
            fit(vectors, labels)
    with pytest.raises(UnknownName, match=r"unknown encoder 'bert'.*hidden-last.*minilm"):
        fit([[1.0], [2.0]], ["a", "b"], "bert")
    with pytest.raises(BadOption, match="penalty"):
        fit_softmax([[1.0], [2.0]], ["a", "b"], penalty=0.0)


def test_constant_columns_and_equal_vectors_do_no_harm():
    x = np.array([[1.0, 7.0], [1.0, 7.0], [2.0, 7.0], [2.0, 7.0]])
    for fit in (fit_centroids, fit_softmax):
        found = fit(x, ["a", "a", "b", "b"])
        assert found.label([1.0, 7.0]) == "a"
        assert np.isfinite(found.scores([1.5, 1e9])).all()
    assert np.isfinite(fit_centroids(np.ones((2, 3)), ["a", "b"]).scores(np.ones(3))).all()


def test_odd_vectors():
    assert router().scores([math.nan, 1.0]) == pytest.approx([0.5, 0.5])
    assert router().scores([0.5, 0.5]) == pytest.approx([0.5, 0.5])
    with pytest.raises(BadOption, match=r"vector=\(3,\).*2 numbers"):
        router().scores([1.0, 2.0, 3.0])


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", [fit_centroids, fit_softmax])
def test_what_is_saved_is_loaded(fit, tmp_path):
    x, labels = clouds(20)
    made = fit(x, labels, "minilm")
    save_router(made, tmp_path / "mine.router")
    read = load_router(tmp_path / "mine.router")
    assert (read.kind, read.labels, read.encoder, read.size) == (made.kind, ("a", "b", "c"), "minilm", 8)
    for row in x:
        assert read.scores(row) == pytest.approx(made.scores(row), abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.router"]


def stored(path, **changes):
    save_router(router("hidden-mean"), path)
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"])) | changes.pop("about", {})
    arrays |= {"about": np.array(json.dumps(about)), **changes}
    with path.open("wb") as file:
        np.savez(file, **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"about": {"format": "metasd-router 9"}}, "format: is 'metasd-router 9', this version reads"),
        ({"about": {"kind": "tree"}}, "kind: is 'tree'"),
        ({"about": {"labels": ["math"]}}, "labels: is not a list"),
        ({"about": {"labels": ["math", 3]}}, "labels: is not a list"),
        ({"about": {"encoder": "bert"}}, "encoder: is 'bert'.*minilm"),
        ({"weights": np.zeros((3, 2))}, r"weights: has shape \(3, 2\), not \(2, 2\)"),
        ({"center": np.zeros((2, 2))}, "center: has shape"),
        ({"bias": np.array([0.0, math.nan])}, "bias: holds numbers that are not finite"),
        ({"scale": None}, "is no router"),
        ({"scale": np.array(["a", "b"])}, "truncated or no router"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(changes, says, tmp_path):
    stored(tmp_path / "x.router", **changes)
    with pytest.raises(BadRouter, match=says) as caught:
        load_router(tmp_path / "x.router")
    assert caught.value.file == "x.router"


def test_foreign_truncated_missing_and_unwritable_files(tmp_path):
    whole = tmp_path / "whole"
    save_router(router(), whole)
    for name, content in (
        ("empty", b""),
        ("text", b"no router at all"),
        ("half", whole.read_bytes()[: whole.stat().st_size // 2]),
        ("pickle", b"\x80\x04."),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadRouter, match=f"router {name}: is truncated or no router"):
            load_router(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("readme", "hello")
    with pytest.raises(BadRouter, match="router zip: is no router"):
        load_router(tmp_path / "zip")
    with pytest.raises(BadRouter, match="no such file"):
        load_router(tmp_path / "nothing")
    with pytest.raises(BadRouter, match="truncated or no router"):
        load_router(tmp_path)
    with pytest.raises(BadRouter, match="cannot be written"):
        save_router(router(), tmp_path / "no" / "folder")


# -- the policy --------------------------------------------------------------------------------------------------------


def test_it_plays_the_routed_arm_whatever_it_earns():
    policy = Routed(router())
    for _ in range(30):
        for vector, arm in ((MATH, "eagle-math@8"), (CODE, "eagle-code@8")):
            situation = Situation(HEADS, {}, {}, vector)
            assert policy.select(situation, RNG) == Choice(arm)
            policy.update(situation, Choice(arm), {arm: 0.0})
    assert policy.values() == {"eagle-math@8": 0.0, "eagle-code@8": 0.0}


def test_without_a_vector_or_an_arm_of_a_label():
    policy = Routed(router())
    assert policy.select(Situation(HEADS), RNG) == Choice(PLAIN)
    assert policy.select(Situation(("suffix@16", "lookup@8"), {}, {}, MATH), RNG) == Choice("suffix@16")
    assert policy.select(Situation(("eagle-code@8", PLAIN), {}, {}, MATH), RNG) == Choice("eagle-code@8")  # next best


def test_how_labels_find_arms():
    given = Routed(router(), {"math": "suffix@16"})
    assert given.select(Situation(HEADS, {}, {}, MATH), RNG).arm == "suffix@16"
    assert given.select(Situation(HEADS, {}, {}, CODE), RNG).arm == "eagle-code@8"
    named = Routed(router())
    arms = ("aftermath@8", "math@4", "math@8", "code", PLAIN)
    assert named.select(Situation(arms, {}, {}, MATH), RNG).arm == "math@4"
    assert named.select(Situation(arms, {}, {}, CODE), RNG).arm == "code"


def test_two_labels_of_one_arm_add_up():
    three = fit_centroids(np.eye(3), ["math", "physics", "code"])
    policy = Routed(three, {"physics": "eagle-math@8"})
    between = np.array([0.5, 0.5, 0.51])  # a little nearer to code than to either
    assert three.label(between) == "code"
    assert policy.select(Situation(HEADS, {}, {}, between), RNG).arm == "eagle-math@8"


def test_a_pool_that_does_not_fit_is_refused_before_anything_runs():
    def pool(**options):
        return make_pool(["suffix@16", "lookup@8", "plain"], "routed", policy_options={"router": router(), **options})

    with pytest.raises(BadOption, match="arms that serve its labels: math, code"):
        pool()
    with pytest.raises(UnknownName, match=r"unknown arm of label 'math' 'sufix@16'.*suffix@16"):
        pool(arms={"math": "sufix@16"})
    with pytest.raises(UnknownName, match=r"unknown label of policy routed 'maths'; there are: code, math"):
        pool(arms={"maths": "suffix@16"})
    assert pool(arms={"math": "suffix@16", "code": "lookup@8"}).selector.encoding == Encoding("", 2)
    assert make_pool(["suffix@16", "plain"], "routed").selector.encoding is None


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"routers": 1}, UnknownName, "arms, prior, prior_options, router, weight"),
        ({"router": 3}, BadOption, "router="),
        ({"router": "no-such-file"}, BadRouter, "no such file"),
        ({"arms": ["math"]}, BadOption, "arms="),
        ({"arms": {"math": 3}}, BadOption, "arms="),
        ({"weight": -1}, BadOption, "weight"),
        ({"prior": "hinted"}, UnknownName, "hinted_ucb"),
        ({"prior": "routed"}, BadOption, "another policy"),
        ({"prior": 3}, BadOption, "another policy"),
        ({"prior": "ucb", "prior_options": {"gamma": 1}}, UnknownName, "beta"),
        ({"prior_options": {"c": 1.0}}, BadOption, "no prior is named"),
    ],
)
def test_wrong_options(options, error, says):
    with pytest.raises(error, match=says):
        policy_factory("routed", options)


def test_a_router_from_a_file(tmp_path):
    save_router(router("minilm"), tmp_path / "five.router")
    policy = policy_factory("routed", {"router": str(tmp_path / "five.router"), "prior": "ucb"})()
    assert policy.encoding == Encoding("minilm", 2)


# -- the start of a bandit ---------------------------------------------------------------------------------------------


def prior(policy="hinted_ucb", **options):
    return policy_factory("routed", {"router": router(), "prior": policy, **options})()


def learn(policy, means, rounds, vector, seed=0):
    rng = np.random.default_rng(seed)
    played = []
    for _ in range(rounds):
        situation = Situation(HEADS, {}, {}, vector)
        arm = policy.select(situation, rng).arm
        policy.update(situation, Choice(arm), {arm: float(np.clip(means[arm] + 0.02 * rng.standard_normal(), 0, 1))})
        played.append(arm)
    return played


def test_the_prior_by_hand():
    """All prompts taught 0.3 and 0.2; the router is sure of math (cosines 1 and -1: shares 1 and 0)."""
    policy = prior("ucb", weight=2)
    for arm, reward in (("eagle-math@8", 0.3), ("eagle-code@8", 0.2), (PLAIN, 0.1)):
        policy.update(Situation(HEADS), Choice(arm), {arm: reward})
    situation = Situation(HEADS, {}, {}, MATH)
    policy.update(situation, Choice(PLAIN), {PLAIN: 0.1})
    arms = policy.dump()["labels"]["math"]["arms"]
    keep = 0.25  # of three rounds
    assert arms["eagle-math@8"] == pytest.approx({"count": keep + 2, "sum": 0.3 * keep + 2 * 0.3 * 1.5})
    assert arms["eagle-code@8"] == pytest.approx({"count": keep + 2, "sum": 0.2 * keep + 2 * 0.2 * 0.5}, abs=1e-6)
    assert arms[PLAIN] == pytest.approx({"count": keep + 1, "sum": 0.1 * keep + 0.1})
    assert "suffix@16" not in arms  # no label names it
    assert policy.dump()["all"]["arms"][PLAIN] == pytest.approx({"count": 2.0, "sum": 0.2})  # nothing pretended there


@pytest.mark.parametrize("name", ["hinted_ucb", "ucb", "thompson", "discounted_ucb", "exp3", "linucb"])
def test_a_new_prompt_starts_with_the_routers_arm_more_often(name):
    means = {"eagle-math@8": 0.2, "eagle-code@8": 0.2, "suffix@16": 0.12, PLAIN: 0.0625}
    shares = {}
    for vector, arm in ((MATH, "eagle-math@8"), (CODE, "eagle-code@8")):
        policy = prior(name, weight=6)
        for turn in range(80):
            played = HEADS[turn % 4]
            policy.update(Situation(HEADS), Choice(played, 0.25), {played: means[played]})
        first = [learn(policy_copy(policy), means, 6, vector, seed) for seed in range(12)]
        counts = [sum(run.count(head) for run in first) for head in ("eagle-math@8", "eagle-code@8")]
        shares[arm] = counts
    assert shares["eagle-math@8"][0] > shares["eagle-math@8"][1]
    assert shares["eagle-code@8"][1] > shares["eagle-code@8"][0]


def policy_copy(policy):
    made = RoutedPrior(router(), policy._make, {}, 6)
    made.load(json.loads(json.dumps(policy.dump())))
    return made


def test_nothing_is_pretended_of_an_arm_that_never_played():
    policy = prior("ucb", weight=2)
    policy.update(Situation(HEADS), Choice("eagle-math@8"), {"eagle-math@8": 0.1})
    policy.update(Situation(HEADS, {}, {}, MATH), Choice(PLAIN), {PLAIN: 0.1})
    arms = policy.dump()["labels"]["math"]["arms"]
    assert set(arms) == {"eagle-math@8", PLAIN}
    assert arms["eagle-math@8"] == pytest.approx({"count": 2.25, "sum": 0.1 * 0.25 + 2 * 0.1 * 1.5})
    assert policy.select(Situation(HEADS, {}, {}, CODE), RNG) == Choice("eagle-code@8")  # one real round


def test_a_wrong_router_is_corrected():
    """The router says math; code is three times as good."""
    means = {"eagle-math@8": 0.1, "eagle-code@8": 0.3, "suffix@16": 0.12, PLAIN: 0.0625}
    shares = [learn(prior(), means, 120, MATH, seed)[40:].count("eagle-code@8") / 80 for seed in range(5)]
    assert np.median(shares) > 0.8, shares
    assert learn(Routed(router()), means, 5, MATH) == ["eagle-math@8"] * 5  # the baseline never is


def test_labels_keep_their_own_best_arms():
    """Two kinds of prompts in turn: one bandit for all has to change its mind each time, one a label does not."""
    math_text = {"eagle-math@8": 0.3, "eagle-code@8": 0.1, "suffix@16": 0.12, PLAIN: 0.0625}
    code_text = {**math_text, "eagle-math@8": 0.1, "eagle-code@8": 0.3}
    routed, alone = prior(), HintedUCB()
    right = {"routed": 0, "alone": 0}
    for turn in range(20):
        means, vector = ((math_text, MATH), (code_text, CODE))[turn % 2]
        best = max(means, key=means.get)
        for name, policy in (("routed", routed), ("alone", alone)):
            right[name] += learn(policy, means, 10, vector, turn).count(best)
    assert right["routed"] > 170 > right["alone"], right


def test_the_routers_arm_plays_one_real_round_first():
    policy = prior("ucb")
    situation = Situation(HEADS, {}, {}, CODE)
    assert policy.select(situation, RNG) == Choice("eagle-code@8")
    policy.update(situation, Choice("eagle-code@8"), {"eagle-code@8": 0.2})
    assert policy.dump()["labels"] == {}
    policy.update(situation, policy.select(situation, RNG), dict.fromkeys(HEADS, 0.2))
    assert set(policy.dump()["labels"]) == {"code"}


def test_states_of_other_routers_and_broken_ones():
    policy = prior()
    learn(policy, dict.fromkeys(HEADS, 0.2), 20, MATH)
    before = policy.dump()
    other = policy_factory("routed", {"router": fit_centroids(np.eye(2), ["qa", "sums"]), "prior": "hinted_ucb"})()
    with pytest.raises(BanditMemoryError, match="no label 'math'"):
        other.load(before)
    for change, says in (
        ({"all": None}, "all is not"),
        ({"labels": {"math": {}}}, "hinted_ucb"),
        ({"labels": 3}, "labels"),
    ):
        with pytest.raises(BanditMemoryError, match=says):
            policy.load({**before, **change})
    assert policy.dump() == before
    fresh = prior()
    fresh.load(json.loads(json.dumps(before)))
    assert fresh.dump() == before


def test_what_the_started_policy_wants_is_passed_on():
    assert prior("linucb", prior_options={"features": ["entropy"]}).features == ("entropy",)
    assert set(ENCODERS) == {"minilm", "hidden-mean", "hidden-last"}
    assert isinstance(router(), Router)
