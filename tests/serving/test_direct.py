"""The byte path gives exactly the decoded path's bytes, or declines the request."""

from __future__ import annotations

import copy
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.errors import InputError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import load
from recinfer.modules.embedding_configs import DataType
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.server.server import Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import NUM_DENSE, RANKER_ROWS, Ranker, copy_with_missing, make_archive, make_request
from tests.inference.test_delta import changed, save
from tests.serving.mutations import mutated
from tests.serving.paths import BytePath, decoded, together
from tests.waiting import until


def service_of(path: Path, limits: Limits | None = None) -> InferenceService:
    return InferenceService(ModelRegistry({"ranker": load(path)}), limits)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> InferenceService:
    """Tables cut by rows and columns, sums and means, one table of two features."""
    return service_of(make_archive(tmp_path_factory.mktemp("direct"))[1].root)


def some_of(request: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    bags = [request[name] for name in names]
    return KeyedJaggedTensor(
        names, torch.cat([b.values() for b in bags]), lengths=torch.cat([b.lengths() for b in bags]).int()
    )


def same_floats(got: bytes, expected: bytes) -> None:
    for a, b in zip(
        pb.PredictResponse.FromString(got).outputs, pb.PredictResponse.FromString(expected).outputs, strict=True
    ):
        assert (a.name, list(a.shape)) == (b.name, list(b.shape))
        pair = [torch.frombuffer(bytearray(x.values), dtype=torch.float32) for x in (a, b)]
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


def test_lookups_are_the_ordinary_ones(service: InferenceService) -> None:
    chosen = random.Random(3)
    for seed in range(60):
        features = make_request(RANKER_ROWS, chosen.choice([1, 2, 17, 200]), seed, longest=chosen.choice([1, 2, 9]))
        names = chosen.sample(list(RANKER_ROWS), chosen.randint(1, len(RANKER_ROWS)))
        features = some_of(features, names)
        if seed % 3 == 0:
            features = KeyedJaggedTensor(names, features.values().int(), lengths=features.lengths())
        data = codec.encode_lookup_request(features, "ranker" if seed % 2 else "")
        assert BytePath(service).lookup(data) == decoded(service, "Lookup", data)


def test_a_table_of_every_precision(tmp_path: Path) -> None:
    for precision in (DataType.INT4, DataType.INT2, DataType.FP16, DataType.BF16, DataType.FP32):
        service = service_of(make_archive(tmp_path / precision.value, precision=precision)[1].root)
        data = codec.encode_lookup_request(make_request(RANKER_ROWS, 9))
        assert BytePath(service).lookup(data) == decoded(service, "Lookup", data)


def test_predictions_alone_and_together(service: InferenceService) -> None:
    messages = []
    for seed, batch in enumerate((1, 5, 1, 40)):
        dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(seed))
        messages.append(codec.encode_predict_request(dense, make_request(RANKER_ROWS, batch, seed)))
    expected = [decoded(service, "Predict", message) for message in messages]
    for message, answer in zip(messages, expected):
        (found,) = BytePath(service).predict(message)
        assert found is not None
        same_floats(found, answer)
    bad_id = codec.encode_predict_request(torch.zeros(1, NUM_DENSE), one_id(5000))
    nan = codec.encode_predict_request(torch.full((1, NUM_DENSE), float("nan")), one_id(1))
    given = BytePath(service, max_batch=44).predict(messages[0], bad_id, *messages[1:], nan)
    assert given[1] is None and given[-1] is None
    for got, answer in zip([given[0], *given[2:-1]], expected, strict=True):
        assert got is not None
        same_floats(got, answer)
    # and dispatched, where each gets its answer or its error
    answers = together(service, "Predict", [messages[0], bad_id, nan, messages[3]])
    assert isinstance(answers[0], bytes) and isinstance(answers[3], bytes)
    assert "out of range" in str(answers[1]) or "5000" in str(answers[1])
    assert "dense: sample 0" in str(answers[2])


def test_large_predictions_alone_and_together_through_a_server(service: InferenceService) -> None:
    """32 to 128 KB: run outside gRPC's thread, split when alone, and merged when they come together."""
    predictor = service.registry.get().predictor
    requests = []
    for seed, batch in enumerate((400, 520, 450, 612)):
        dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(seed))
        requests.append((dense, make_request(RANKER_ROWS, batch, seed, longest=5)))
        assert 32 << 10 < len(codec.encode_predict_request(*requests[-1])) < 128 << 10
    expected = [predictor.predict(*request) for request in requests]
    with Server({"ranker": predictor}) as server, InferenceClient(server.target, timeout=60) as client:

        def ask(number: int) -> None:
            for name, found in client.predict(*requests[number % 4]).items():
                torch.testing.assert_close(found, expected[number % 4][name], rtol=1e-5, atol=1e-6)

        for number in range(12):
            ask(number)
        assert server.scheduler is not None
        assert server.scheduler.state.requests == server.scheduler.state.runs == 12
        assert server.scheduler.state.samples == 3 * sum(dense.shape[0] for dense, _ in requests)
        with ThreadPoolExecutor(8) as callers:
            list(callers.map(ask, range(80)))
        assert server.scheduler.state.requests == 92
        for change, says in (((0, 5000), "5000"), ((1, float("nan")), "dense: sample 0")):
            dense, kjt = (part.clone() if isinstance(part, torch.Tensor) else part for part in requests[0])
            values = kjt.values().clone()
            (values if change[0] == 0 else dense.view(-1))[0] = change[1]
            with pytest.raises(InputError, match=says):
                client.predict(dense, KeyedJaggedTensor(list(kjt.keys()), values, lengths=kjt.lengths()))
        ask(0)
        scheduler = server.scheduler
        until(lambda: scheduler.state.running == 0)  # a run is counted until its worker has answered it


def test_parts_of_a_prediction_are_the_whole_to_the_bit(service: InferenceService) -> None:
    whole, parts = BytePath(service), BytePath(service, threads=3)
    for batch in (64, 127, 128, 200, 501):
        dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(batch))
        data = codec.encode_predict_request(dense, make_request(RANKER_ROWS, batch, batch, longest=3))
        request = parts.read(data)
        assert request is not None
        assert request.parts(3) == min(3, batch // 64)
        (answer,) = parts.predict(data)
        assert answer is not None and [answer] == whole.predict(data)
        for at, number in ((-1, float("nan")), (0, float("inf"))):
            wrong = dense.clone()
            wrong.view(-1)[at] = number
            data = codec.encode_predict_request(wrong, make_request(RANKER_ROWS, batch, batch, longest=3))
            assert parts.predict(data) == [None]
        ones = torch.ones(len(RANKER_ROWS) * batch, dtype=torch.int32)
        for at in (0, -1):
            values = torch.ones(len(ones), dtype=torch.int64)
            values[at] = 5000
            bad = KeyedJaggedTensor(list(RANKER_ROWS), values, lengths=ones)
            assert parts.predict(codec.encode_predict_request(dense, bad)) == [None]
    whole.close()
    parts.close()


def test_samples_that_see_each_other_stay_together(service: InferenceService) -> None:
    data = codec.encode_predict_request(torch.zeros(300, NUM_DENSE), make_request(RANKER_ROWS, 300))
    request = BytePath(service).read(data)
    assert request is not None
    alone = copy.copy(request.state)
    alone.mergeable = False
    assert request.parts(4) == 4
    assert request._replace(state=alone).parts(4) == 1


def test_very_large_numbers_take_the_decoded_path_without_a_warning(service: InferenceService) -> None:
    """Their sum overflows, and a signalling NaN is invalid; numpy would print a warning to the server's stderr."""
    values = np.array([1e30, 3e38, -3e38, np.inf, np.nan, 0], np.float32)
    values.view(np.int32)[-1] = 0x7F800001
    requests = [
        codec.encode_predict_request(torch.from_numpy(np.repeat(values[n : n + 1], NUM_DENSE)[None]), one_id(1))
        for n in range(len(values))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BytePath(service).predict(*requests) == [None] * len(values)


def one_id(value: int) -> KeyedJaggedTensor:
    names = list(RANKER_ROWS)
    return KeyedJaggedTensor(
        names,
        torch.tensor([value if n == "f_item" else 1 for n in names]),
        lengths=torch.ones(len(names), dtype=torch.int32),
    )


def test_what_is_not_plain_is_left_to_the_ordinary_way(service: InferenceService) -> None:
    paths = BytePath(service)
    features = make_request(RANKER_ROWS, 2)
    plain = codec.encode_lookup_request(features)
    weighted = KeyedJaggedTensor(
        features.keys(), features.values(), lengths=features.lengths(), weights=torch.ones(len(features.values()))
    )
    unknown = KeyedJaggedTensor(["f_none"], torch.tensor([1]), lengths=torch.tensor([1], dtype=torch.int32))
    twice = pb.LookupRequest(
        features=pb.JaggedFeatures(keys=["f_user", "f_user"], batch_size=1, lengths=bytes(8), values=b"")
    ).SerializeToString()
    large = codec.encode_lookup_request(make_request(RANKER_ROWS, 9000))
    for data in (
        codec.encode_lookup_request(one_id(1201)),
        codec.encode_lookup_request(one_id(-1)),
        codec.encode_lookup_request(weighted),
        codec.encode_lookup_request(unknown),
        codec.encode_lookup_request(features, "other"),
        codec.encode_lookup_request(features, "", "99"),
        twice,
        large,
        plain[:-1],
        plain + b"\x1a\x00",
        b"",
        b"\x0a",
    ):
        assert paths.lookup(data) is None
    dense = torch.zeros(2, NUM_DENSE)
    context = some_of(make_request(RANKER_ROWS, 1), ["f_user"])
    rest = some_of(features, ["f_item", "f_hist", "f_cat"])
    for data in (
        codec.encode_predict_request(dense, rest),  # not complete
        codec.encode_predict_request(dense, some_of(features, ["f_item", "f_hist"]), context=context),  # not complete
        codec.encode_predict_request(dense, features, context=context),  # twice
        codec.encode_predict_request(dense, rest, context=some_of(features, ["f_user"])),  # of two samples
        codec.encode_predict_request(dense[:, :2].contiguous(), features),
        pb.PredictRequest(raw=b"x").SerializeToString(),
    ):
        assert paths.predict(data) == [None]
    # A LookupRequest has no context: that field number is an unknown field.
    assert paths.lookup(plain + codec.encode_predict_request(dense, rest, context=context)[-20:]) is None
    both = pb.PredictRequest(context=pb.JaggedFeatures(keys=["f_user"], batch_size=1, lengths=bytes(4)))
    assert paths.lookup(plain + both.SerializeToString()) is None
    assert decoded(service, "Lookup", plain + both.SerializeToString()) == decoded(service, "Lookup", plain)


def test_a_context_is_looked_up_once_and_gives_the_ordinary_answer(service: InferenceService) -> None:
    chosen, paths, parts = random.Random(5), BytePath(service), BytePath(service, threads=2)
    for seed in range(40):
        batch = chosen.choice([1, 2, 17, 130, 300])
        names = chosen.sample(list(RANKER_ROWS), len(RANKER_ROWS))
        user = names[: chosen.randint(1, len(names) - 1)]
        context = some_of(make_request(RANKER_ROWS, 1, seed, longest=chosen.choice([1, 2, 9])), user)
        features = some_of(make_request(RANKER_ROWS, batch, seed + 1), names[len(user) :])
        if seed % 3 == 0:
            context = KeyedJaggedTensor(context.keys(), context.values().int(), lengths=context.lengths())
        dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(seed))
        data = codec.encode_predict_request(dense, features, "ranker" if seed % 2 else "", context=context)
        found = paths.predict(data)
        assert found == [decoded(service, "Predict", data)]
        assert parts.predict(data) == found
    parts.close()


def test_contexts_beside_others_in_one_run_and_what_is_wrong_with_one(service: InferenceService) -> None:
    rest, context = make_request(RANKER_ROWS, 3), make_request(RANKER_ROWS, 1, 7)
    rest, context = some_of(rest, ["f_item", "f_hist", "f_cat"]), some_of(context, ["f_user"])
    dense = torch.ones(3, NUM_DENSE)
    good = codec.encode_predict_request(dense, rest, context=context)
    plain = codec.encode_predict_request(dense, make_request(RANKER_ROWS, 3))
    far = KeyedJaggedTensor(["f_user"], torch.tensor([10**6]), lengths=torch.ones(1, dtype=torch.int32))
    weighted = KeyedJaggedTensor(
        ["f_user"], torch.tensor([1]), lengths=torch.ones(1, dtype=torch.int32), weights=torch.ones(1)
    )
    wrong = [codec.encode_predict_request(dense, rest, context=each) for each in (far, weighted)]
    given = BytePath(service).predict(good, plain, *wrong, good)
    assert given[2] is given[3] is None
    for message, answer in zip((good, plain, good), (given[0], given[1], given[4]), strict=True):
        assert answer is not None
        same_floats(answer, decoded(service, "Predict", message))
    said = together(service, "Predict", [wrong[0], good])
    with pytest.raises(InputError) as ordinary:
        decoded(service, "Predict", wrong[0])
    assert str(said[0]) == str(ordinary.value)
    assert isinstance(said[1], bytes)


def test_a_feature_left_out_is_refused_whichever_way_answers(service: InferenceService, tmp_path: Path) -> None:
    """Alone, with others in one run, and in a context; an archive that allows it answers, the same on each path."""
    four, user = make_request(RANKER_ROWS, 3), some_of(make_request(RANKER_ROWS, 1, 7), ["f_user"])
    dense = torch.ones(3, NUM_DENSE)
    whole = codec.encode_predict_request(dense, four)
    beside = codec.encode_predict_request(dense, some_of(four, ["f_item", "f_hist", "f_cat"]), context=user)
    lacking = {
        "'f_hist', 'f_cat'; got f_user, f_item": codec.encode_predict_request(
            dense, some_of(four, ["f_user", "f_item"])
        ),
        "'f_hist'; got f_item, f_cat, f_user": codec.encode_predict_request(
            dense, some_of(four, ["f_item", "f_cat"]), context=user
        ),
    }
    for words, data in lacking.items():
        for _ in range(2):  # the order of its keys is new, then known
            assert BytePath(service).predict(data) == [None]
            with pytest.raises(InputError, match=f"^missing features: {words}\\."):
                decoded(service, "Predict", data)
        given = together(service, "Predict", [data, whole, beside, data])
        assert [str(given[at]).split(".")[0] for at in (0, 3)] == [f"missing features: {words}"] * 2
        for answer, message in zip(given[1:3], (whole, beside)):
            assert isinstance(answer, bytes)
            same_floats(answer, decoded(service, "Predict", message))
    before = service_of(
        copy_with_missing(service.registry.get().predictor.archive.root, tmp_path / "before.rqa", "empty")
    )
    for data in lacking.values():
        for answer in (*together(before, "Predict", [data]), *together(before, "Predict", [data] * 2)):
            assert isinstance(answer, bytes)
            same_floats(answer, decoded(before, "Predict", data))


def test_mutated_messages_with_a_context(service: InferenceService) -> None:
    chosen = random.Random(17)
    rest = some_of(make_request(RANKER_ROWS, 2), ["f_item", "f_hist", "f_cat"])
    context = some_of(make_request(RANKER_ROWS, 1, 7), ["f_user"])
    answered = 0
    start, paths = codec.encode_predict_request(torch.ones(2, NUM_DENSE), rest, context=context), BytePath(service)
    for data in mutated(chosen, [start], 1500):
        (found,) = paths.predict(data)
        if found is not None:
            answered += 1
            assert found == decoded(service, "Predict", data)
    assert answered > 20


def test_limits_are_the_ordinary_ways(tmp_path: Path) -> None:
    path = make_archive(tmp_path)[1].root
    features = make_request(RANKER_ROWS, 8)
    data = codec.encode_lookup_request(features)
    for limits in (
        Limits(max_batch=7),
        Limits(max_ids=len(features.values()) - 1),
        Limits(max_keys=3),
        Limits(max_message_bytes=len(data) - 1),
        Limits(max_response_bytes=4 * 8 * (12 + 16 + 16 + 20) - 4),
    ):
        assert BytePath(service_of(path, limits)).lookup(data) is None


def test_mutated_messages(service: InferenceService, num_mutated: int) -> None:
    """Whatever the bytes, the answer is the decoded path's, or none."""
    chosen = random.Random(11)
    starts = [codec.encode_lookup_request(make_request(RANKER_ROWS, batch, batch)) for batch in (1, 3)]
    answered, paths = 0, BytePath(service)
    for data in mutated(chosen, starts, num_mutated):
        found = paths.lookup(data)
        if found is not None:
            answered += 1
            assert found == decoded(service, "Lookup", data)
    assert answered > num_mutated // 100


def test_a_delta_reaches_it_at_once(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model, archive = make_archive(tmp_path / "a", model=Ranker())
    new = changed(model, 3, part=0.5)
    make_delta(archive.root, new, save(new, tmp_path / "new.pt"), tmp_path / "d.rqd", progress=False)
    service = service_of(archive.root)
    predictor = service.registry.get().predictor
    data = codec.encode_lookup_request(make_request(RANKER_ROWS, 30))
    paths = BytePath(service)
    before = paths.lookup(data)
    predictor.apply_delta(tmp_path / "d.rqd")
    after = paths.lookup(data)
    assert before is not None and after is not None
    assert before != after == decoded(service, "Lookup", data)
    predictor.undo_delta()
    assert paths.lookup(data) == before


def test_through_a_server_and_in_its_figures(service: InferenceService) -> None:
    predictor = service.registry.get().predictor
    features = make_request(RANKER_ROWS, 3)
    with Server({"ranker": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        before = predictor.stages.state()["lookup"].count
        found = client.lookup(features)
        torch.testing.assert_close(found.pooled.values(), predictor.lookup(features).pooled.values(), rtol=0, atol=0)
        outputs = client.predict(torch.zeros(3, NUM_DENSE), features)
        torch.testing.assert_close(outputs["output"], predictor.predict(torch.zeros(3, NUM_DENSE), features)["output"])
        assert server.scheduler is not None
        assert server.scheduler.state.requests == 2
        assert server.stats.requests() == {("Lookup", "OK"): 1, ("Predict", "OK"): 1}
        assert predictor.stages.state()["lookup"].count == before + 4
        assert server.stats.batch.state().count == 2
