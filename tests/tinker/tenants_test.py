"""Checkpoints on disk: names that are taken, free again, or malformed."""

import asyncio
import time
from functools import partial
from types import SimpleNamespace

import pytest

from rlx.base import UserError
from rlx.tinker import tenants
from rlx.tinker.tenants import Tenant

PATH = "tinker://run:train:0/weights/first"


def save(tenant, path=PATH, expires=None, overwrite=False):
    return tenant.save(path, {"expires": expires}, lambda directory: None, overwrite)


def test_a_name_is_free_again_once_its_checkpoint_has_expired(tmp_path):
    tenant = Tenant(tmp_path)
    save(tenant, expires=1.0)
    assert save(tenant) == {"path": PATH}
    with pytest.raises(UserError, match="is taken"):
        save(tenant)
    save(tenant, overwrite=True)


@pytest.mark.parametrize("name", ["../first", ".hidden", "a/b", ""])
def test_a_malformed_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="is malformed"):
        save(Tenant(tmp_path), f"tinker://run:train:0/weights/{name}", overwrite=True)
    assert not any(tmp_path.iterdir())


def test_a_new_session_ends_those_of_every_client_that_has_gone(tmp_path, monkeypatch):
    """Their adapters stayed in the device's memory until the same key came again."""
    tinker_api = pytest.importorskip("rlx.tinker.tinker_api")
    one, other = Tenant(tmp_path / "one"), Tenant(tmp_path / "other")
    api = tinker_api.TinkerApi(
        None, None, (), "", (), tmp_path, 1, _tenants={"one": one, "other": other}
    )
    session, kept = one.open(), other.open()
    for tenant, name in ((one, session), (other, kept)):
        tenant.models[f"{name}:train:0"] = "adapters"
    one._heard[session] -= 2 * tenants._SILENCE
    api._open(other, {})
    assert not one.models
    assert list(other.models) == [f"{kept}:train:0"]


def test_a_load_reads_what_the_request_before_it_saved(tmp_path):
    """It took the number of updates from the checkpoint of before, for moments of the new one."""
    tinker_api = pytest.importorskip("rlx.tinker.tinker_api")

    class Trainer:
        def save(self, *_, **__):
            pass

        def load(self, where, updates):
            return SimpleNamespace(updates=updates)

    async def main():
        api = tinker_api.TinkerApi(Trainer(), None, ("base",), "", (), tmp_path, 1)
        tenant = Tenant(tmp_path / "one")
        run = f"{tenant.open()}:train:0"
        model = tenants.TrainedModel(run, {}, SimpleNamespace(updates=1))
        tenant.models[run], path = model, f"tinker://{run}/weights/last"
        save = partial(api._submit, partial(api._save, "weights"), tenant)
        named = {"model_id": run, "path": "last", "overwrite": True}
        await tenant.futures[save({**named, "seq_id": 0})["request_id"]]
        model.state.updates = 6
        save({**named, "seq_id": 1})
        load = {"model_id": run, "seq_id": 2, "path": path, "optimizer": True}
        await tenant.futures[api._load(tenant, load)["request_id"]]
        assert model.state.updates == 6

    asyncio.run(main())


@pytest.mark.parametrize("session", ["*", "../*/*"])
def test_the_end_of_a_session_that_is_a_pattern_removes_nothing(tmp_path, session):
    """A client could remove the unnamed weights of all others: a path's %2F is a slash."""
    one, other = Tenant(tmp_path / "one"), Tenant(tmp_path / "other")
    kept = [
        tmp_path / name / f"{tenant.open()}:train:0" / tenants.UNNAMED / "5"
        for name, tenant in (("one", one), ("other", other))
    ]
    for path in kept:
        path.mkdir(parents=True)
    one.end(session)
    assert all(path.exists() for path in kept)


def test_a_run_s_last_request_is_the_latest_not_the_last_by_name(tmp_path):
    pytest.importorskip("aiohttp")
    from rlx.tinker.tinker_api import TinkerApi

    tenant, record = Tenant(tmp_path), {"expires": None, "checkpoint_metadata": None}
    for name in ("z", "a"):
        path = f"tinker://run:train:0/weights/{name}"
        tenant.save(path, {**record, "name": name}, lambda directory: None, False)
        time.sleep(0.01)
    answer = TinkerApi._run(None, tenant, {"run": "run:train:0"})
    times = [each["time"] for each in tenant.listed_checkpoints("*")]
    assert (answer["name"], answer["last_request_time"]) == ("a", max(times))
