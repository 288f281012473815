r"""A chat server. Each request is a `generate` in a thread of its own; on a GPU they decode together.

    python examples/serve.py --port 8000
    python examples/serve.py --model Qwen/Qwen3-1.7B --device cuda --dtype bfloat16 --rows 32
    curl -N localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d \
        '{"messages": [{"role": "user", "content": "ROMEO:"}], "max_tokens": 40, "stream": true}'
    curl localhost:8000/stats

Requests and answers have OpenAI's shape; fields that `Question` does not have are ignored. A client
that leaves ends its call, and the next call gets its row.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from common import BadArgument, chat_as_one_text, server_parser
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from streaming import Answer, encode

from hf_static_kv import attach
from hf_static_kv.testing import load_model


class Message(BaseModel):
    role: str
    content: str


class Question(BaseModel):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=2.0)  # 0: the likeliest tokens
    stream: bool = False


async def events(answer: Answer) -> AsyncIterator[str]:
    def event(**choice: Any) -> str:
        chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        return f"data: {json.dumps(chunk)}\n\n"

    try:
        async for text in answer.texts():
            yield event(delta={"content": text}, finish_reason=None)
        yield event(delta={}, finish_reason=answer.finish_reason) + "data: [DONE]\n\n"
    except Exception as error:  # the status is sent already
        yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"


def build_app(model: Any, tokenizer: Any, **settings: Any) -> FastAPI:
    """`settings` are those of `attach`. A chat computes its new tokens only."""
    app = FastAPI()
    info = attach(model, reuse_prefix=True, **settings)
    chat_as_one_text(tokenizer)

    @app.post("/v1/chat/completions")
    async def complete(question: Question, request: Request) -> Any:
        messages = [message.model_dump() for message in question.messages]
        try:
            inputs = encode(messages, question.max_tokens, model, tokenizer)
        except BadArgument as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        heat = {"temperature": question.temperature} if question.temperature else {}
        answer = Answer(tokenizer, question.max_tokens)
        answer.start(model, **inputs, do_sample=bool(heat), **heat)
        answer.end_after(request.receive())  # the body is read: what comes next is a disconnect
        if question.stream:
            return StreamingResponse(events(answer), media_type="text/event-stream")
        message = {"role": "assistant", "content": "".join([text async for text in answer.texts()])}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
        return {"object": "chat.completion", "choices": [choice]}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        names = ("calls", "rows", "queue", "tokens_per_second", "reused_tokens", "fallback_reason")
        return {name: getattr(info, name) for name in names}

    return app


def main() -> None:
    args = server_parser().parse_args()
    model, tokenizer = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    uvicorn.run(build_app(model, tokenizer, max_rows=args.rows), port=args.port)


if __name__ == "__main__":
    main()
