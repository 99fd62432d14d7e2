"""Load by locust: start `saccade serve` first, pip install locust, then
locust -f examples/server_locust.py --host http://localhost:8000 --headless -u 8 -r 4 -t 30s"""

import json
import random
import time

from locust import HttpUser, between, task

STORY = "Rain fell on the town, and nobody spoke of the storm. "


class Reader(HttpUser):
    wait_time = between(0.1, 0.5)

    def ask(self, stream: bool) -> dict:
        policy = random.choice(["dense", "psa", "streaming(window=256)"])
        body = {"prompt": STORY * random.randint(1, 20), "max_tokens": 8, "policy": policy, "stream": stream}
        return {"url": "/v1/completions", "json": body, "stream": stream, "name": "stream" if stream else "short"}

    @task(3)
    def short(self) -> None:
        with self.client.post(**self.ask(False), catch_response=True) as response:
            if response.status_code == 200 and not response.json()["choices"][0]["finish_reason"]:
                response.failure("no finish_reason")

    @task(1)
    def streamed(self) -> None:
        began = time.perf_counter()
        with self.client.post(**self.ask(True), catch_response=True) as response:
            events = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
            reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
            if events[-1:] != [b"[DONE]"] or sum(reason is not None for reason in reasons) != 1:
                response.failure("a stream that does not end as it should")
        self.environment.events.request.fire(
            request_type="SSE", name="to the end", response_time=1000 * (time.perf_counter() - began),
            response_length=len(events), exception=None, context={},
        )  # fmt: skip
