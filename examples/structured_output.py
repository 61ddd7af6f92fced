"""Machine-readable answers: a JSON schema, a regular expression, a choice."""

import json

from mainspring import LLM, SamplingParams, StructuredOutputsParams

city = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Japan", "Peru"]},
        "millions": {"type": "integer", "minimum": 0, "maximum": 40},
    },
    "required": ["name", "country", "millions"],
    "additionalProperties": False,
}
forms = {
    "Describe a city as JSON.": StructuredOutputsParams(json=city),
    "Give me a phone number.": StructuredOutputsParams(regex=r"\+[0-9]{2} [0-9]{3} [0-9]{4}"),
    "Is the sky blue?": StructuredOutputsParams(choice=["yes", "no"]),
}

with LLM() as llm:
    params = [SamplingParams(structured_outputs=form, seed=1, max_tokens=200) for form in forms.values()]
    for output in llm.generate(list(forms), params, use_tqdm=False):
        print(f"{output.prompt} -> {output.outputs[0].text}")
        if output.prompt == "Describe a city as JSON.":
            print("  its country:", json.loads(output.outputs[0].text)["country"])
