"""The unmodified client `tinker` against a real server of the embedded model."""

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="tinker is not installed")
from tinker import types  # noqa: E402

from rlx.model import peft  # noqa: E402
from rlx.model.directory import load_config, resolve  # noqa: E402

pytestmark = [
    pytest.mark.witnesses,
    # The client's own: its loop never ends, and it warns of what it will remove.
    pytest.mark.filterwarnings("ignore"),
]
BASE = "rlx:arithmetic"
PROMPT, WORDS = "12+30=?", "77"


@pytest.fixture(scope="module", autouse=True)
def _no_open_connections():
    """Closes those of the client's first requests, which it leaves open."""
    yield
    from tinker.lib import internal_client_holder

    loop, done = internal_client_holder._internal_client_holder_thread_singleton.get_loop(), Event()

    def close():
        for transport in [*loop._transports.values()]:
            transport.abort()
        loop.call_later(0.2, done.set)

    loop.call_soon_threadsafe(close)
    assert done.wait(10)


@pytest.fixture
def service(tinker_server, monkeypatch):
    """Makes clients, by default all of one tenant."""
    made = []

    def make(key="tml-one"):
        made.append(tinker.ServiceClient(base_url=tinker_server.url, api_key=key))
        return made[-1]

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield make
    for client in made:
        client.close("success").result(30)


def sft_datum(tokenizer, prompt=PROMPT, words=WORDS):
    before, after = tokenizer.encode(prompt), tokenizer.encode(words)
    tokens = before + after
    weights = [0.0] * (len(before) - 1) + [1.0] * len(after)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(client, datum, steps=6, rate=0.02):
    losses = []
    for _ in range(steps):
        done = client.forward_backward([datum] * 3, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=rate))
        losses.append(done.result(120).metrics["loss:sum"])
        assert step.result(60).metrics["grad_norm"] > 0
    return losses


def greedy(sampler, tokenizer, n=1, **options):
    prompt = types.ModelInput.from_ints(tokenizer.encode(PROMPT))
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    return sampler.sample(prompt, n, params, **options).result(120)


def test_capabilities_and_health(service):
    client = service()
    found = {model.model_name: model for model in client.get_server_capabilities().supported_models}
    assert found[BASE].max_context_length == load_config(resolve(BASE)).max_position


def test_training_changes_what_is_sampled(service, tinker_server, tmp_path):
    client = service()
    trained = client.create_lora_training_client(base_model=BASE, rank=4, seed=7)
    tokenizer = trained.get_tokenizer()
    assert trained.get_info().lora_rank == 4
    datum = sft_datum(tokenizer)
    before = trained.save_weights_and_get_sampling_client()
    base = client.create_sampling_client(base_model=BASE)
    first = greedy(before, tokenizer).sequences[0]
    assert first.tokens == greedy(base, tokenizer).sequences[0].tokens  # B is zero
    losses = train(trained, datum, steps=15)
    assert losses[-1] < 0.05 * losses[0]
    path = trained.save_weights_for_sampler("after").result(60).path
    after = client.create_sampling_client(model_path=path)
    found = greedy(after, tokenizer, n=2, include_prompt_logprobs=True)
    assert [
        tokenizer.decode(s.tokens[: len(tokenizer.encode(WORDS))]) for s in found.sequences
    ] == [WORDS] * 2
    assert greedy(before, tokenizer).sequences[0].tokens == first.tokens  # as it was saved
    assert greedy(base, tokenizer).sequences[0].tokens == first.tokens

    # The server's log-probabilities are the trainer's.
    tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].data[-1]]
    scored = after.compute_logprobs(types.ModelInput.from_ints(tokens)).result(60)
    ours = trained.forward([datum], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"]
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], ours.data, atol=1e-4)
    asked = len(tokenizer.encode(PROMPT))
    np.testing.assert_allclose(found.prompt_logprobs[1:], ours.data[: asked - 1], atol=1e-4)
    last = after.compute_logprobs(types.ModelInput.from_ints(tokens), prompt_logprobs_last_n=2)
    assert [x is None for x in last.result(60)] == [True] * (len(tokens) - 2) + [False] * 2
    sampled = found.sequences[0]
    whole = types.ModelInput.from_ints(tokenizer.encode(PROMPT) + list(sampled.tokens))
    again = after.compute_logprobs(whole).result(60)[-len(sampled.tokens) :]
    np.testing.assert_allclose(sampled.logprobs, again, atol=1e-4)
    assert len({s.sequence_id for s in found.sequences}) == 2

    # The export is PEFT's.
    external = trained.save_weights_external("export").result(60).path
    rest = client.create_rest_client()
    for name, url in rest.get_external_weights_urls(external).result(30).urls.items():
        (tmp_path / name).write_bytes(urllib.request.urlopen(url, timeout=30).read())
    assert peft.load(tmp_path, load_config(resolve(BASE)))[0].rank == 4


def test_a_client_s_own_loss_is_its_two_passes(service):
    import torch

    client = service().create_lora_training_client(base_model=BASE, rank=2, seed=1)
    plain = service().create_lora_training_client(base_model=BASE, rank=2, seed=1)
    datum = sft_datum(client.get_tokenizer())
    weights = torch.tensor(datum.loss_fn_inputs["weights"].data)

    def own(data, logprobs):
        return -sum((p * weights).sum() for p in logprobs), {}

    client.forward_backward_custom([datum], own).result(60)
    plain.forward_backward([datum], "cross_entropy").result(60)
    steps = [c.optim_step(types.AdamParams()).result(60) for c in (client, plain)]
    assert steps[0].metrics["grad_norm"] == pytest.approx(steps[1].metrics["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_losses_on_rollouts_raise_what_has_an_advantage(service, loss):
    client = service().create_lora_training_client(base_model=BASE, rank=4, seed=2)
    tokenizer = client.get_tokenizer()
    sampler = client.save_weights_and_get_sampling_client()
    prompt = tokenizer.encode(PROMPT)
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    found = sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result(60).sequences
    data = []
    for index, sample in enumerate(found):
        tokens, pad = prompt + list(sample.tokens), [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": pad + list(sample.logprobs),
            "advantages": pad + [1.0 if index == 0 else -0.1] * len(sample.tokens),
        }
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    before = client.forward(data, loss).result(60)
    client.forward_backward(data, loss).result(60)
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result(60)
    after = client.forward(data, loss).result(60)
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]
    if loss == "importance_sampling":  # the server samples with the trainer's probabilities
        own_tokens = sum(len(s.tokens) for s in found)
        lengths = [len(s.tokens) for s in found]
        wanted = -sum((1.0 if i == 0 else -0.1) * n for i, n in enumerate(lengths))
        assert before.metrics["loss:sum"] == pytest.approx(wanted, abs=1e-3 * own_tokens)


def test_a_saved_state_continues_exactly(service):
    client = service()
    one = client.create_lora_training_client(base_model=BASE, rank=4, seed=3)
    datum = sft_datum(one.get_tokenizer())
    train(one, datum, steps=2)
    path = one.save_state("middle").result(60).path
    wanted = train(one, datum, steps=3)
    whole = client.create_training_client_from_state_with_optimizer(path)
    assert train(whole, datum, steps=3) == wanted
    part = client.create_training_client_from_state(path)
    assert part.get_info().lora_rank == 4
    found = train(part, datum, steps=3)
    assert found[0] == wanted[0]
    assert found[1:] != wanted[1:]  # Adam began anew


def test_many_chunks_of_one_call_arrive_in_any_order(service):
    client = service().create_lora_training_client(base_model=BASE, rank=2, seed=4)
    datum = sft_datum(client.get_tokenizer())
    result = client.forward_backward([datum] * 2100, "cross_entropy").result(300)  # 1024 a chunk
    one = client.forward([datum], "cross_entropy").result(60)
    assert len(result.loss_fn_outputs) == 2100
    assert result.metrics["loss:sum"] == pytest.approx(2100 * one.metrics["loss:sum"], rel=1e-4)


def test_two_clients_at_once_get_what_each_gets_by_itself(service):
    def whole(key, rank, words):
        client = service(key)
        trained = client.create_lora_training_client(base_model=BASE, rank=rank, seed=5)
        tokenizer = trained.get_tokenizer()
        losses = train(trained, sft_datum(tokenizer, words=words), steps=4)
        sampler = trained.save_weights_and_get_sampling_client()
        many = [greedy(sampler, tokenizer).sequences[0].tokens for _ in range(4)]
        return losses, many

    given = [("tml-a", 2, "55"), ("tml-b", 4, "66")]
    each = [whole(*one) for one in given]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda one: whole(*one), given))
    assert together == each


def test_tenants_cannot_see_one_another(service, tinker_server):
    mine, theirs = service("tml-mine"), service("tml-theirs")
    trained = mine.create_lora_training_client(base_model=BASE, rank=2)
    state = trained.save_state("s").result(60).path
    sampler = trained.save_weights_for_sampler("w", user_metadata={"a": "b"}).result(60).path
    rest = {"mine": mine.create_rest_client(), "theirs": theirs.create_rest_client()}
    run = trained.model_id
    listed = rest["mine"].list_checkpoints(run).result(30).checkpoints
    assert {c.tinker_path for c in listed} == {state, sampler}
    assert [c.user_metadata for c in listed if c.tinker_path == sampler] == [{"a": "b"}]
    assert rest["mine"].get_training_run(run).result(30).lora_rank == 2
    assert rest["mine"].get_weights_info_by_tinker_path(state).result(30).lora_rank == 2
    assert not rest["theirs"].list_checkpoints(run).result(30).checkpoints
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        theirs.create_sampling_client(model_path=sampler).result(30)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        theirs.create_training_client_from_state(state).result(30)
    with pytest.raises(tinker.NotFoundError):
        rest["theirs"].delete_checkpoint_from_tinker_path(state).result(30)
    code, _ = post(tinker_server, "get_info", {"model_id": run}, key="tml-theirs")
    assert code == 404
    rest["mine"].delete_checkpoint_from_tinker_path(state).result(30)
    assert len(rest["mine"].list_checkpoints(run).result(30).checkpoints) == 1
    with pytest.raises(tinker.NotFoundError):
        mine.create_training_client_from_state(state).result(30)


def post(server, path, body, key="tml-one", method="POST"):
    headers = {"X-API-Key": key} if key else {}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{server.url}/api/v1/{path}"
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("create_custom_loss", {}, 501, "POST /api/v1/create_custom_loss is not part of"),
        ("sessions/search", {}, 501, "POST /api/v1/sessions/search is not part of"),
        ("get_info", {"model_id": "x:train:0"}, 404, "there is no 'x:train:0' among your models"),
        ("optim_step", {"model_id": 5}, 404, "there is no 5 among your models"),
        ("asample", {"sampling_session_id": "x"}, 404, "there is no 'x' among your samplers"),
        ("retrieve_future", {"request_id": "x"}, 404, "there is no 'x' among your futures"),
        ("retrieve_future", {}, 400, "request_id"),
        ("create_session", b"{", 400, "not JSON"),
        ("create_session", b"[]", 400, "JSON object"),
        ("forward_backward", b"\xff\xff", 400, "not a ForwardBackwardRequest"),
        ("session_heartbeat", {"session_id": "x"}, 410, "has ended"),
        ("session_heartbeat", {"session_id": ["x"]}, 400, "unhashable"),
        ("create_model", {"base_model": "other/model"}, 404, "no base model 'other/model'; this"),
        ("create_model", {"base_model": BASE, "session_id": "x"}, 410, "has ended"),
        ("weights_info", {"tinker_path": "tinker://../../x"}, 404, "there is no checkpoint"),
    ],
)
def test_what_is_not_here_is_answered_in_one_line(tinker_server, path, body, status, why):
    code, message = post(tinker_server, path, body)
    assert (code, why in message, "\n" in message) == (status, True, False), message


def test_a_request_that_comes_twice_runs_once_and_early_ones_wait(tinker_server):
    session = post(tinker_server, "create_session", {"tags": []})[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    asked["lora_config"] = {"rank": 2, "seed": 1}
    made = [post(tinker_server, "create_model", asked)[1] for _ in range(2)]
    assert made[0] == made[1]

    def step(number):
        body = {"model_id": made[0]["model_id"], "seq_id": number, "adam_params": {}}
        return post(tinker_server, "optim_step", body)

    def result(promise):
        return post(tinker_server, "retrieve_future", {"request_id": promise["request_id"]})[1]

    late = step(2)[1]
    again = late.copy()
    first = step(1)[1]
    assert result(first) == result(late) == {"metrics": {"grad_norm": 0.0}}
    assert step(2)[1] == again
    assert step(1)[1] == first
    assert step(None)[0] == 410
    save = {"model_id": made[0]["model_id"], "seq_id": 3, "path": "once"}
    path = result(post(tinker_server, "save_weights", save)[1])["path"]
    (record,) = tinker_server.saved.glob(f"*/{path.removeprefix('tinker://')}/record.json")
    assert json.loads(record.read_text())["updates"] == 2


def test_the_page_s_program_runs(tinker_server, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/tinker.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("TINKER_BASE_URL", tinker_server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-anything")
    found = {}
    exec(program, found)
    found["service"].close("success").result(30)
    losses = list(map(float, capsys.readouterr().out.splitlines()[:5]))
    assert losses[-1] < losses[0]


def test_a_key_is_needed(tinker_server):
    assert post(tinker_server, "create_session", {}, key="")[0] == 401


def test_mistakes_in_requests_fail_their_futures_and_the_model_goes_on(service):
    client = service()
    trained = client.create_lora_training_client(base_model=BASE, rank=2)
    tokenizer = trained.get_tokenizer()
    datum = sft_datum(tokenizer)
    bad = types.Datum(model_input=datum.model_input, loss_fn_inputs={"target_tokens": [1, 2]})
    for data, loss, options, why in [
        ([datum], "dro", None, "unknown loss_fn 'dro'"),
        ([bad], "cross_entropy", None, "datum 0 has target_tokens of shape"),
        ([datum], "cross_entropy", {"beta": 1.0}, "no beta"),
    ]:
        with pytest.raises(tinker.RequestFailedError, match=why):
            trained.forward_backward(data, loss, options).result(60)
    assert trained.forward_backward([datum], "cross_entropy").result(60)
    with pytest.raises(tinker.NotFoundError, match="no base model"):
        client.create_lora_training_client(base_model="other/model").result(30)
    with pytest.raises(tinker.RequestFailedError, match=r"lora\.rank=0 is below 1"):
        client.create_lora_training_client(base_model=BASE, rank=0).result(30)
    trained.save_state("twice").result(60)
    with pytest.raises(tinker.RequestFailedError, match="is taken"):
        trained.save_state("twice").result(60)
    trained.save_state("twice", overwrite=True).result(60)
    for name in ("../x", ".x", "a/b"):
        with pytest.raises(tinker.RequestFailedError, match="malformed"):
            trained.save_state(name).result(60)
    sampler = client.create_sampling_client(base_model=BASE)
    prompt = types.ModelInput.from_ints(tokenizer.encode(PROMPT))
    for options, why in [
        ({"max_tokens": 2, "stop": []}, r"stop=\[\]"),
        ({"max_tokens": 2, "top_p": 7.0}, "top_p"),
        ({"max_tokens": 0}, "max_new_tokens=0"),  # it was taken for no limit
    ]:
        with pytest.raises(tinker.RequestFailedError, match=why):
            sampler.sample(prompt, 1, types.SamplingParams(**options)).result(60)
    with pytest.raises(tinker.RequestFailedError, match="topk_prompt_logprobs is not supported"):
        sampler.sample(
            prompt, 1, types.SamplingParams(max_tokens=2), topk_prompt_logprobs=2
        ).result(60)
    with pytest.raises(tinker.RequestFailedError, match="vllm"):
        sampler.sample(
            prompt, 1, types.SamplingParams(max_tokens=2), topk_sample_logprobs=2
        ).result(60)


def test_a_session_s_end_removes_its_models_and_unnamed_weights(service, tinker_server):
    client = tinker.ServiceClient(base_url=tinker_server.url, api_key="tml-end")
    trained = client.create_lora_training_client(base_model=BASE, rank=2)
    trained.save_weights_and_get_sampling_client()
    trained.save_state("kept").result(60)
    session, run = trained.model_id.split(":")[0], trained.model_id
    saved = [p.parent.name for p in tinker_server.saved.glob(f"*/{run}/*/*")]
    assert sorted(saved) == ["unnamed", "weights"]
    assert len(client.create_rest_client().list_checkpoints(run).result(30).checkpoints) == 1
    client.close("success").result(30)
    assert post(tinker_server, "session_heartbeat", {"session_id": session}, "tml-end")[0] == 410
    assert post(tinker_server, "get_info", {"model_id": run}, "tml-end")[0] == 404
    assert [p.name for p in tinker_server.saved.glob(f"*/{run}/*/*")] == ["kept"]
