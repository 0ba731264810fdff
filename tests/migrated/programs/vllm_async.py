import asyncio

from jaxserve import AsyncLLM, SamplingParams

engine = AsyncLLM(model="demo", max_model_len=200, max_num_seqs=4)


async def main():
    params = SamplingParams(temperature=0.0, max_tokens=12)
    async for update in engine.generate("Once upon a time", params, request_id="story-1"):
        print(update.text, end="", flush=True)
    await engine.shutdown()


asyncio.run(main())
