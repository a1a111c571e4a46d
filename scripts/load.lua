-- A load for wrk: wrk -t1 -c16 -d30s --latency --timeout 60s -s scripts/load.lua http://127.0.0.1:8000/v1/completions
-- Its last line counts the answers by kind: with more connections than rows and queue, 429 is right, and 5xx never is.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": true}'

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init()
  ok, refused, failed = 0, 0, 0
end

function response(status)
  if status < 400 then
    ok = ok + 1
  elseif status < 500 then
    refused = refused + 1
  else
    failed = failed + 1
  end
end

function done()
  local sums = { ok = 0, refused = 0, failed = 0 }
  for _, thread in ipairs(threads) do
    for name in pairs(sums) do
      sums[name] = sums[name] + thread:get(name)
    end
  end
  print(string.format("answered %d, refused (4xx) %d, failed (5xx) %d", sums.ok, sums.refused, sums.failed))
end
