"""Tinker's API over HTTP, /api/v1/…, for unmodified clients of `tinker`. Imports aiohttp.

    forward_backward, optim_step, save… ─▶ the model's order ─▶ one thread ─▶ the trainer
    asample ─▶ Samplers ─▶ fleet
    both answer {"request_id": …} at once; retrieve_future waits for the result

Other paths have status 501. A request that cannot be computed fails its future, not its arrival, so
that the order of a model has no gap.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from aiohttp import web

from rlx.agents import dialects, http_listener, online_routes
from rlx.agents.dialects import ApiError
from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.model.lora_config import LoraConfig
from rlx.system.threads import DaemonThreads
from rlx.tinker import binary_messages
from rlx.tinker.lora_trainer import ADAM, ADAPTER, LoraTrainer
from rlx.tinker.samplers import Samplers
from rlx.tinker.target_rows import pack
from rlx.tinker.tenants import UNNAMED, Tenant, TrainedModel, utc

ALPHA = 32.0  # Tinker's adapters are scaled by 32 / rank
MAX_BODY = 64 << 20  # bytes of a request
HOLD_SECONDS = 20.0  # of retrieve_future; the client waits 45
_LINK_SECONDS = 3600.0  # of a download
_UNSUPPORTED = ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
_CHECKPOINT = "tinker://{run}/{kind}/{name}"
_Json = Mapping[str, Any]
_Work = Callable[[Tenant, _Json, TrainedModel], Any]  # on the thread of the trainer


@dataclass(eq=False)
class TinkerApi:
    """Handlers on the running loop; those of JSON take a tenant, and fields of body and path."""

    trainer: LoraTrainer
    samplers: Samplers
    names: tuple[str, ...]  # of the base for clients; the first is in answers
    tokenizer: str  # directory or hub name for clients
    keys: tuple[str, ...]  # API keys of clients; (): any, each with a tenant of its own
    directory: Path  # of checkpoints
    budget: int  # tokens of a microbatch
    _tenants: dict[str, Tenant] = field(default_factory=dict)
    _links: dict[str, Path] = field(default_factory=dict)  # secret → directory to download
    _device: DaemonThreads = field(default_factory=lambda: DaemonThreads(1))

    def application(self, around: Any) -> web.Application:
        """Return the application in a middleware; its last route refuses what no other takes."""
        run, checkpoint = "training_runs/{run}", "training_runs/{run}/checkpoints/{kind}/{name}"

        def saves(kind: str) -> Callable[[Tenant, _Json], Any]:
            return partial(self._submit, partial(self._save, kind))

        handlers: dict[str, Callable[[Tenant, _Json], Any]] = {
            "POST client/config": lambda tenant, args: {},
            "POST client/dynamic_config": lambda tenant, args: {},
            "POST telemetry": lambda tenant, args: {"status": "accepted"},
            "GET healthz": lambda tenant, args: {"status": "ok"},
            "GET get_server_capabilities": self._capabilities,
            "POST create_session": self._open,
            "POST session_heartbeat": lambda tenant, args: {"_": tenant.beat(args["session_id"])},
            "POST sessions/{session}/finish": lambda tenant, args: tenant.end(args["session"]),
            "POST create_model": self._create_model, "POST get_info": self._info,
            "POST forward_backward": partial(self._submit, self._forward_backward),
            "POST optim_step": partial(self._submit, self._optim_step),
            "POST load_weights": self._load,
            "POST save_weights": saves("weights"),
            "POST save_weights_external": saves("external_weights"),
            "POST save_weights_for_sampler": saves("sampler_weights"),
            "POST weights_info": lambda tenant, args: tenant.checkpoint(args["tinker_path"])[1],
            f"GET {run}": self._run, f"GET {run}/checkpoints": self._list,
            "GET checkpoints": self._list, f"DELETE {checkpoint}": self._delete,
            f"GET {checkpoint}/external_weights_urls": self._link,
            "POST create_sampling_session": self._create_sampler,
            "GET samplers/{sampler}": self._sampler, "POST asample": self._sample,
        }  # fmt: skip

        def route(name: str, handler: Callable[[Tenant, _Json], Any]) -> web.RouteDef:
            method, path = name.split()
            return web.route(method, f"/api/v1/{path}", partial(self._json, handler))

        app = web.Application(middlewares=(around, _errors_as_json), client_max_size=MAX_BODY)
        routes = [route(*each) for each in handlers.items()]
        routes.append(web.post("/api/v1/retrieve_future", self._retrieve))
        routes.append(web.get("/download/{link}/{file}", self._download))
        app.add_routes([*routes, web.route("*", "/{_:.*}", _not_here)])
        return app

    def _tenant(self, request: web.Request) -> Tenant:
        key = online_routes.header_key(request)
        if not key or (self.keys and key not in self.keys):
            raise online_routes.unauthorized(key)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        if name not in self._tenants:
            self._tenants[name] = Tenant(self.directory / name)
        return self._tenants[name]

    async def _json(self, handler: Callable[[Tenant, _Json], Any], request: web.Request) -> Any:
        tenant, body = self._tenant(request), await request.read()
        binary = request.path.endswith("/forward_backward")
        args = binary_messages.request_of(body) if binary else dialects.parse(body or b"{}")
        if not isinstance(args, dict):
            raise dialects.invalid("the body", args, "a JSON object")
        path = {**request.match_info, "origin": str(request.url.origin())}
        return web.json_response(handler(tenant, {**args, **path}))

    def _open(self, tenant: Tenant, args: _Json) -> _Json:
        for each in self._tenants.values():  # others may never come again, and hold device memory
            each.end_silent()
        return {"session_id": tenant.open()}

    def _submit(self, work: _Work, tenant: Tenant, args: _Json) -> _Json:
        """Promise the result of `work`, which runs when it is the turn of the request's number."""
        model, number = tenant.find("models", args.get("model_id")), args.get("seq_id")
        name = f"{model.id}:{number}"
        if name not in tenant.futures:  # else a client sends it again
            if not isinstance(number, int) or number < model.next:
                what = f"request {name:.80} is long past or has no number"
                raise ApiError(410, f"{what}; send a new one")
            tenant.promise(name, model.run(number, partial(work, tenant, args), self._device))
        return {"request_id": name, "model_id": model.id}

    async def _retrieve(self, request: web.Request) -> web.Response:
        tenant, name = self._tenant(request), dialects.parse(await request.read())["request_id"]
        task = tenant.find("futures", name)
        if not (await asyncio.wait([task], timeout=HOLD_SECONDS))[0]:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(again)
        tenant.note_fetched(name)
        refusal = task.cancelled() and ApiError(410, "its session has ended; make a new client")
        if error := refusal or task.exception():
            mistake = isinstance(error, UserError | ApiError | ValueError)
            if not mistake:
                http_listener.LOGGER.error("request %s failed", name, exc_info=error)
            why = " ".join(str(error).split()) or type(error).__name__
            return web.json_response({"error": why, "category": "user" if mistake else "server"})
        if isinstance(task.result(), bytes):
            return web.Response(body=task.result(), content_type="application/x-protobuf")
        return web.json_response(task.result())

    def _capabilities(self, tenant: Tenant, args: _Json) -> _Json:
        most, can = self.trainer.config.max_position, {"trainable": True, "sampleable": True}
        models = [{"model_name": name, "max_context_length": most, **can} for name in self.names]
        return {"supported_models": models}

    def _require_base(self, name: Any) -> None:
        if name not in self.names:
            names = ", ".join(self.names)
            raise ApiError(404, f"there is no base model {name!r:.80}; this server has {names}")

    def _create_model(self, tenant: Tenant, args: _Json) -> _Json:
        self._require_base(args.get("base_model"))
        config: dict[str, Any] = {"rank": 32, "train_attn": True, "train_mlp": True}
        config |= args.get("lora_config") or {}
        record = {name: bool(config[name]) for name in ("train_attn", "train_mlp")}
        targets = ("q", "k", "v", "o") * record["train_attn"]
        targets += ("gate", "up", "down") * record["train_mlp"]
        seed = secrets.randbits(31) if config.get("seed") is None else config["seed"]

        def work(tenant: Tenant, args: _Json, model: TrainedModel) -> None:
            model.state = self.trainer.fresh(LoraConfig(config["rank"], ALPHA, targets), seed)

        return self._new_model(tenant, args, {**record, "lora_rank": config["rank"]}, work)

    def _new_model(self, tenant: Tenant, args: _Json, record: _Json, work: _Work) -> _Json:
        if (args.get("optimizer_config") or {"type": "adamw"}).get("type") != "adamw":
            raise ApiError(400, "optimizer_config.type is not adamw; leave it out")
        name = f"{tenant.beat(args.get('session_id'))}:train:{args.get('model_seq_id')}"
        fields = {"base_model": self.names[0], "is_lora": True, "train_unembed": False}
        fields |= {"user_metadata": args.get("user_metadata")}
        tenant.models.setdefault(name, TrainedModel(name, {**record, **fields}))
        return self._submit(work, tenant, {"model_id": name, "seq_id": 0})

    def _info(self, tenant: Tenant, args: _Json) -> _Json:
        model = tenant.find("models", args.get("model_id"))
        data = {"model_name": self.names[0], "tokenizer_id": self.tokenizer}
        return {"model_id": model.id, "model_data": data, **model.record}

    def _forward_backward(self, tenant: Tenant, args: _Json, model: TrainedModel) -> bytes:
        message, state = args["message"], model.trained()
        data, options = binary_messages.data_of(message), binary_messages.options_of(message)
        rows = pack(data, message.loss_fn, options, self.trainer.config, self.budget)
        results = self.trainer.run(state, message.loss_fn, rows, backward=not message.forward_only)
        return binary_messages.losses_reply(*results)

    def _optim_step(self, tenant: Tenant, args: _Json, model: TrainedModel) -> _Json:
        adam = args.get("adam_params")
        if not isinstance(adam, dict) or set(adam) - set(ADAM):
            raise UserError("optim_step has other parameters than Adam's; give AdamParams")
        return {"metrics": {"grad_norm": self.trainer.step(model.trained(), adam)}}

    def _save(self, kind: str, tenant: Tenant, args: _Json, model: TrainedModel) -> _Json:
        if args.get("age_encryption_recipients"):
            raise UserError("files cannot be encrypted here; drop age_encryption_recipients")
        state, number = model.trained(), args.get("sampling_session_seq_id")
        name = f"{kind}/{args['path']}" if args.get("path") else f"{UNNAMED}/{number}"
        path = f"tinker://{model.id}/{name}"
        expires = args.get("ttl_seconds") and time.time() + args["ttl_seconds"]
        fields = {"checkpoint_metadata": args.get("user_metadata"), "expires": expires}
        record = {**model.record, **fields, "updates": state.updates}

        def write(directory: Path) -> None:
            self.trainer.save(state, directory, self.tokenizer, moments=kind == "weights")

        saved = tenant.save(path, record, write, bool(args.get("overwrite")))
        if args.get("path"):
            return saved
        sampler = f"{model.id.partition(':')[0]}:sample:{number}"
        tenant.samplers[sampler] = path
        return {"sampling_session_id": sampler}

    def _load(self, tenant: Tenant, args: _Json) -> _Json:
        path, moments = args.get("path"), bool(args.get("optimizer"))
        where, record = tenant.checkpoint(path)
        if moments and record["updates"] and where.parent.name != "weights":
            raise ApiError(400, "a sampler's weights have no optimizer; load a saved state")

        def work(tenant: Tenant, args: _Json, model: TrainedModel) -> None:
            where, record = tenant.checkpoint(path)  # a request before this one may replace it
            model.state = self.trainer.load(where, record["updates"] * moments)

        if args.get("session_id"):
            return self._new_model(tenant, args, record, work)
        return self._submit(work, tenant, args)

    def _list(self, tenant: Tenant, args: _Json) -> _Json:
        checkpoints = [*tenant.listed_checkpoints(args.get("run", "*"))]
        cursor = {"offset": 0, "limit": len(checkpoints), "total_count": len(checkpoints)}
        return {"checkpoints": checkpoints, "cursor": cursor}

    def _run(self, tenant: Tenant, args: _Json) -> _Json:
        if not (saved := [*tenant.listed_checkpoints(args["run"])]):
            raise ApiError(404, f"run {args['run']!r:.80} has no checkpoint; save one first")
        newest = max(saved, key=itemgetter("time"))  # they are listed by name
        last = {"last_request_time": newest["time"], "model_owner": "you"}
        record = tenant.checkpoint(newest["tinker_path"])[1]
        return {"training_run_id": args["run"], **last, **record}

    def _delete(self, tenant: Tenant, args: _Json) -> None:
        shutil.rmtree(tenant.checkpoint(_CHECKPOINT.format(**args))[0], ignore_errors=True)

    def _link(self, tenant: Tenant, args: _Json) -> _Json:
        where, link = tenant.checkpoint(_CHECKPOINT.format(**args))[0], secrets.token_urlsafe(24)
        self._links[link] = where / ADAPTER
        asyncio.get_running_loop().call_later(_LINK_SECONDS, self._links.pop, link)
        names, place = os.listdir(where / ADAPTER), f"{args['origin']}/download/{link}"
        urls = {name: f"{place}/{name}" for name in names}
        return {"urls": urls, "expires": utc(time.time() + _LINK_SECONDS)}

    async def _download(self, request: web.Request) -> web.FileResponse:
        where = self._links.get(request.match_info["link"], Path())
        file = where / Path(request.match_info["file"]).name
        if where == Path() or not file.is_file():
            raise ApiError(404, "the link or its checkpoint is gone; fetch new URLs")
        return web.FileResponse(file)

    def _create_sampler(self, tenant: Tenant, args: _Json) -> _Json:
        if path := args.get("model_path"):
            tenant.checkpoint(path)
        else:
            self._require_base(args.get("base_model"))
        number = args.get("sampling_session_seq_id")
        name = f"{tenant.beat(args.get('session_id'))}:sample:{number}"
        tenant.samplers[name] = path
        return {"sampling_session_id": name}

    def _sampler(self, tenant: Tenant, args: _Json) -> _Json:
        path, name = tenant.find("samplers", args["sampler"]), args["sampler"]
        return {"sampler_id": name, "base_model": self.names[0], "model_path": path}

    def _sample(self, tenant: Tenant, args: _Json) -> _Json:
        sampler = args.get("sampling_session_id")
        path, name = tenant.find("samplers", sampler), f"{sampler}:{args.get('seq_id')}"
        if name not in tenant.futures:  # else a client sends it again
            adapter = path and tenant.checkpoint(path)[0] / ADAPTER
            tenant.promise(name, self._generate(adapter, args))
        ids = [f"{name}:{index}" for index in range(args["num_samples"])]
        return {"request_id": name, "sample_sequence_ids": ids}

    async def _generate(self, adapter: Path | None, args: _Json) -> bytes:
        chunks, spec = args["prompt"]["chunks"], args["sampling_params"]
        prompt = [token for chunk in chunks for token in chunk.get("tokens", ())]
        room, stop = self.trainer.config.max_position - len(prompt), spec.get("stop")
        most = room if spec.get("max_tokens") is None else min(spec["max_tokens"], room)
        refused = [name for name in _UNSUPPORTED if args.get(name)]
        refused += [f"a chunk of {c['type']}" for c in chunks if c["type"] != "encoded_text"]
        refused += ["stop=[], as the model's end always stops"] * (stop == [])
        refused += [f"a prompt of {len(prompt)} tokens"] * (not prompt or room < 1)
        if refused:
            raise UserError(f"{refused[0]} is not supported here; leave it out")
        stops, top = [stop] if isinstance(stop, str) else stop or [], args["topk_sample_logprobs"]
        sampling = Sampling(
            temperature=spec["temperature"], top_p=spec["top_p"], top_k=max(spec["top_k"], 0),
            max_new_tokens=most, seed=spec.get("seed"),
            stop=tuple(s for s in stops if isinstance(s, str)), top_logprobs=top,
            stop_token_ids=tuple(s for s in stops if not isinstance(s, str)),
        )  # fmt: skip
        scored = args.get("prompt_logprobs_last_n") or len(prompt)
        scored *= bool(args.get("prompt_logprobs"))
        result = await self.samplers.sample(adapter, prompt, sampling, args["num_samples"], scored)
        return binary_messages.sample_reply(*result, top)


async def _not_here(request: web.Request) -> web.Response:
    what = f"{request.method} {request.path}"
    raise ApiError(501, f"{what} is not part of this server; docs/tinker.md lists what is")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable) -> web.StreamResponse:
    """Answer errors by {"error": one line}."""
    try:
        return await handler(request)
    except ApiError as refused:
        status, why = refused.status, str(refused)
    except (*http_listener.MALFORMED, KeyError, TypeError) as broken:
        status, why = 400, f"the body cannot be read: {broken!r}"
    except web.HTTPRequestEntityTooLarge:
        status, why = 413, f"the body is larger than {MAX_BODY >> 20} MiB; send fewer data at once"
    return web.json_response({"error": why}, status=status)
