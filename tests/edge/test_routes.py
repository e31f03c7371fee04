from gateway.edge import routes


def test_only_the_listed_paths_exist() -> None:
    assert routes.find(b"/v1/chat/completions") is routes.ROUTES[b"/v1/chat/completions"]
    for path in (b"/v1/chat/completions/", b"//v1/chat/completions", b"/v1/Chat/completions", b"/v1/chat%2Fcompletions",
                 b"/v1/../v1/models", b"/v1/models/", b"/invocations", b"/",
                 b"", b"/version", b"/v1/modelsx", b"/v1/models\0"):  # fmt: skip
        assert routes.find(path) is None, path


def test_a_model_id_may_hold_slashes() -> None:
    for path in (b"/v1/models/tiny", b"/v1/models/org/name", b"/v1/models/org%2Fname"):
        assert routes.find(path) is routes.MODEL


def test_each_route_has_one_method_one_task_and_its_roles() -> None:
    for path, route in routes.ROUTES.items():
        assert route.roles
        assert route.method in ("GET", "POST")
        assert (route.task is not None) == (route.kind == "proxy"), path
        assert ("client" in route.roles) == (path not in (b"/metrics", b"/health/live", b"/health/ready"))
    assert "prober" not in routes.ROUTES[b"/metrics"].roles
