"""The JSON Schema of config files, by which editors complete and check them."""

from typing import Any

import pydantic.json_schema

from jaxserve.config.schema import Config


class _Generator(pydantic.json_schema.GenerateJsonSchema):
    """Without the titles that pydantic makes of names: editors would show them in the place of the descriptions."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def config_json_schema() -> dict[str, Any]:
    """As draft 2020-12 has it. Like the loader it takes an empty section: its lines may all be commented out."""
    schema = Config.model_json_schema(schema_generator=_Generator)
    sections: dict[str, Any] = schema["$defs"]
    for section in (schema, *sections.values()):
        section.pop("title", None)
        for name, field in section.get("properties", {}).items():
            if "$ref" in field:  # the defaults of a whole section stand at its fields
                about = sections[field["$ref"].rpartition("/")[2]]["description"]
                section["properties"][name] = {
                    "description": about,
                    "anyOf": [{"$ref": field["$ref"]}, {"type": "null"}],
                }
    return {"$schema": pydantic.json_schema.GenerateJsonSchema.schema_dialect, **schema}
