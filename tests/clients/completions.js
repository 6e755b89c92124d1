// k6: 20 completions by two users; the run fails if one of them does.
import http from "k6/http";
import { check } from "k6";

export const options = {
  vus: 2,
  iterations: 20,
  thresholds: { http_req_failed: ["rate==0"], checks: ["rate==1"], http_reqs: ["count==20"] },
};

export default function () {
  const body = JSON.stringify({ prompt: "Gravity is", max_tokens: 4, temperature: 0, ignore_eos: true });
  const answer = http.post(`${__ENV.URL}/v1/completions`, body, { headers: { "Content-Type": "application/json" } });
  check(answer, { "has four tokens": (r) => r.status === 200 && r.json("usage.completion_tokens") === 4 });
}
