"""What the server says that it serves."""

from __future__ import annotations

from openai.types import Model


def test_models_are_listed_and_described_under_every_name(make_client):
    client = make_client(served_model_name=("tiny", "org/other name"))
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["tiny", "org/other name"]
    service = client.app.state.service
    for model in listed["data"]:
        Model.model_validate(model, strict=True)
        assert model["max_model_len"] == service.max_model_len and model["root"] == "tiny"
        assert model["created"] == service.created
        assert client.get(f"/v1/models/{model['id']}").json() == model


def test_an_unknown_model_is_not_found(client):
    for name in ("other", "a/b", "%00", "x" * 5000):
        response = client.get(f"/v1/models/{name}")
        assert response.status_code == 404 and len(response.content) < 1000
        assert response.json()["error"]["code"] == "model_not_found"
