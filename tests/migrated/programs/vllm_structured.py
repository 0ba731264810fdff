from jaxserve import LLM, SamplingParams, StructuredOutput

llm = LLM(model="demo", max_model_len=200, max_num_seqs=4)
schema = {"type": "integer", "minimum": 0, "maximum": 99}
for constraint in (
    StructuredOutput(choice=("yes", "no")),
    StructuredOutput(regex="[0-9]{1,3}"),
    StructuredOutput(json_schema=schema),
):
    params = SamplingParams(temperature=0.0, max_tokens=40, structured=constraint)
    [answer] = llm.chat([{"role": "user", "content": "What is 12+30?"}], params)
    print(answer.outputs[0].text)
