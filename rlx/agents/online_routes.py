"""The HTTP of sessions that outside applications have; docs/online.md has its status codes.

admin key     POST, GET /v1/sessions; GET /v1/sessions/ID/trajectories
session key   POST /v1/rewards, /v1/session/end, /v1/session/refresh
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from rlx.agents import dialects, returns
from rlx.agents.dialects import ApiError
from rlx.agents.online import OnlineSessions, shown
from rlx.agents.session_state import Denied, SessionState
from rlx.agents.sessions import Session

RETRY_SECONDS = (1, 600)  # the least and the most that a Retry-After says
_STATUS = {  # by the reason of a refusal
    "ended": 410, "taken": 410, "open": 409, "early": 409, "bound": 409, "unknown": 404,
    "full": 429, "completion": 400, "short": 400, "nameless": 400,
}  # fmt: skip
_Handler = Callable[[OnlineSessions, web.Request], Awaitable[web.Response]]


def add(router: web.UrlDispatcher, prefix: str, online: OnlineSessions) -> None:
    """Add the routes below a prefix; admins have no keys in addresses."""
    for (method, path), handler in (_OF_SESSIONS if "{key}" in prefix else _ROUTES).items():

        async def answer(request: web.Request, handler: _Handler = handler) -> web.Response:
            return await handler(online, request)

        router.add_route(method, prefix + path, answer)


def header_key(request: web.Request) -> str:
    """Return the API key in a request's headers; "" where there is none."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else ""
    return given or request.headers.get("x-api-key", "")


def refusal(refused: Denied) -> ApiError:
    """Return the HTTP answer to what a session refused."""
    code = "session_ended" if refused.reason == "ended" else f"session_{refused.reason}"
    return ApiError(_STATUS[refused.reason], str(refused), code=code, wait=refused.wait)


def session_of(online: OnlineSessions, key: str) -> Session | None:
    """Return the open session of a key, None for an unknown key; raise Denied or ApiError."""
    if key and online.is_admin(key):
        raise ApiError(403, "the admin key generates nothing; make a session, and use its key")
    return online.find(key)


def rewarded(online: OnlineSessions, request: web.Request, body: Any) -> web.Response | None:
    """Answer the reward of a key's latest session; None where the key is of no session here."""
    if (state := online.current(_key(request))) is None:
        return None
    data = _body(body, {"reward", "completion_id"})
    value = data.get("reward")
    if name := dialects.take(data, "completion_id", str, ""):
        value = {name: value}
    if state.completions or not isinstance(value, Mapping):  # else it is too early
        if wrong := returns.mistake(value, state.completions):
            raise ApiError(400, wrong.replace("run returned", "the reward is"), "reward")
        value = returns.plain(value)
    return _told(online.reward(state.id, value))


async def _make(online: OnlineSessions, request: web.Request) -> web.Response:
    _require_admin(online, request)
    data = _body(dialects.parse(await request.read() or b"{}"), {"task_id", "api_key"})
    task, key = (dialects.take(data, name, str, "") for name in ("task_id", "api_key"))
    state, key = online.open(task, key)
    return web.json_response({**shown(state), "api_key": key}, status=201)


async def _list(online: OnlineSessions, request: web.Request) -> web.Response:
    _require_admin(online, request)
    data = [shown(state) for state in online.states.values()]
    return web.json_response({"object": "list", "data": data})


async def _export(online: OnlineSessions, request: web.Request) -> web.Response:
    _require_admin(online, request)
    name = request.match_info["id"]
    state = online.state(name)
    if state.slot < 0 or state.why:  # those of a run are taken by its training
        online.take(name, "exported", state.why)
    body = await online.export(name)
    return web.Response(body=body, content_type="application/json")


async def _end(online: OnlineSessions, request: web.Request) -> web.Response:
    state = online.current(_key(request))
    if state is None:
        raise _stranger(online, _key(request))
    return _told(online.end(state.id, "application"))


async def _refresh(online: OnlineSessions, request: web.Request) -> web.Response:
    state = online.refresh(_key(request))
    if state is None:
        raise _stranger(online, _key(request))
    return _told(state)


_OF_SESSIONS: Mapping[tuple[str, str], _Handler] = {
    ("POST", "/v1/session/end"): _end,
    ("POST", "/v1/session/refresh"): _refresh,
}
_ROUTES: Mapping[tuple[str, str], _Handler] = {
    ("POST", "/v1/sessions"): _make,
    ("GET", "/v1/sessions"): _list,
    ("GET", "/v1/sessions/{id}/trajectories"): _export,
    **_OF_SESSIONS,
}


def _told(state: SessionState) -> web.Response:
    return web.json_response(shown(state))


def _key(request: web.Request) -> str:
    return request.match_info.get("key") or header_key(request)


def _require_admin(online: OnlineSessions, request: web.Request) -> None:
    key = header_key(request)
    if online.is_admin(key):
        return
    if online.known(key):
        raise ApiError(403, "this is a session's API key; sessions are made by the admin key")
    raise _stranger(online, key)


def _stranger(online: OnlineSessions, key: str) -> ApiError:
    if key and online.is_admin(key):
        return ApiError(403, "the admin key has no session of its own; use a session's key")
    what = "an unknown API key" if key else "no API key"
    return ApiError(401, f"{what}; send the one that was given", code="invalid_api_key")


def _body(data: Any, names: set[str]) -> Mapping[str, Any]:
    dialects.check_fields(data, names, set(), names)
    return data
