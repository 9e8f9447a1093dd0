"""A small server of OpenAI's API for tests, a process of its own: `python model_server.py PORT`.

The prompt says how it behaves: `{"delay": 0.2}`, `{"status": 429}`, `{"drop": true}`,
`{"together": 16}` (none is answered before that many are there). Its key is
KEY; its models are MODELS. /wrong/… answers without an API, /slow/… never.
"""

import asyncio
import itertools
import json
import sys

from aiohttp import web

KEY = "sk-real"
MODELS = ("tiny-model", "other-model")
_numbers = itertools.count()
_waiting = []  # requests that are answered with the last of those that come together


def refused(request):
    """A 401 where the key is wrong."""
    if request.headers.get("Authorization") == f"Bearer {KEY}":
        return None
    return web.json_response({"error": {"message": "Incorrect API key provided."}}, status=401)


async def models(request):
    """The list."""
    return refused(request) or web.json_response({"data": [{"id": name} for name in MODELS]})


async def chat(request):
    """One completion."""
    if wrong := refused(request):
        return wrong
    body = await request.json()
    if body["model"] not in MODELS:
        text = f"The model `{body['model']}` does not exist."
        return web.json_response({"error": {"message": text}}, status=404)
    wish = json.loads(body["messages"][-1]["content"]) if body.get("max_tokens") != 1 else {}
    await asyncio.sleep(wish.get("delay", 0))
    if "together" in wish:
        _waiting.append(mine := asyncio.Event())
        if len(_waiting) == wish["together"]:
            for waiting in _waiting:
                waiting.set()
            _waiting.clear()
        await mine.wait()
    if wish.get("drop"):
        request.transport.close()
        return web.Response()
    if "status" in wish:
        text = {"error": {"message": f"refused, request {next(_numbers)}"}}
        return web.json_response(text, status=wish["status"])
    name, text = f"chatcmpl-{next(_numbers)}", "It is 42."
    if body.get("stream"):
        return await stream(request, name, text)
    message = {"role": "assistant", "content": text}
    return web.json_response({
        "id": name, "object": "chat.completion", "created": 1, "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17},
    })  # fmt: skip


async def stream(request, name, text):
    """The same in events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece, reason in [*((word, None) for word in text.split(" ")), ("", "stop")]:
        choice = {"index": 0, "delta": {"content": piece}, "finish_reason": reason}
        event = {"id": name, "object": "chat.completion.chunk", "created": 1,
                 "model": "tiny-model", "choices": [choice]}  # fmt: skip
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.02)
    await response.write(b"data: [DONE]\n\n")
    await asyncio.sleep(0.2)  # the end comes later than the last event
    return response


async def never(request):
    """No answer."""
    await asyncio.sleep(3600)


async def page(request):
    """Something else than an API."""
    return web.Response(text="<html>Welcome</html>", content_type="text/html")


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/slow/v1/models", never)
    app.router.add_get("/wrong/v1/models", page)
    runner = web.AppRunner(app, shutdown_timeout=0)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    loop.run_until_complete(site.start())
    print(runner.addresses[0][1], flush=True)
    sys.stdin.close()
    loop.run_forever()
