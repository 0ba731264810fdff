import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
[name] = [model.id for model in client.models.list()]
messages = [{"role": "user", "content": "What is 12+30?"}]
answer = client.chat.completions.create(model=name, messages=messages, max_tokens=12, temperature=0)
print(answer.choices[0].message.content)
stream = client.chat.completions.create(model=name, messages=messages, max_tokens=12, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
