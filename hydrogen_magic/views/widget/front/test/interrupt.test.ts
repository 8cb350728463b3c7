import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { findServer, interruptKernel } from "../src/interrupt";

const fetched = vi.fn<(url: string, options: RequestInit) => Promise<Response>>();

beforeEach(() => {
  fetched.mockReset().mockResolvedValue(new Response(null, { status: 204 }));
  vi.stubGlobal("fetch", fetched);
  vi.spyOn(document, "cookie", "get").mockReturnValue("a=b; _xsrf=2|abc|def; c=d");
});
afterEach(() => {
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
  document.head.replaceChildren();
  document.body.removeAttribute("data-base-url");
});

function configured(config: unknown): void {
  const script = document.createElement("script");
  script.id = "jupyter-config-data";
  script.type = "application/json";
  script.textContent = typeof config === "string" ? config : JSON.stringify(config);
  document.head.append(script);
}

const headers = () => fetched.mock.calls[0]?.[1].headers as Record<string, string>;

test("asks the server that the page came from, with the cookie's token", async () => {
  configured({ baseUrl: "/user/ada/", token: "" });
  expect(await interruptKernel("k 1")).toBe("done");
  const [url, options] = fetched.mock.calls[0] ?? [];
  expect(url).toBe(`${location.origin}/user/ada/api/kernels/k%201/interrupt`);
  expect(options?.method).toBe("POST");
  expect(headers()["X-XSRFToken"]).toBe("2|abc|def");
  expect(headers().Authorization).toBeUndefined();
});

test("a token that the page was given is used", async () => {
  configured({ baseUrl: "/", token: "t0" });
  await interruptKernel("k");
  expect(headers().Authorization).toBe("token t0");
});

test("nbclassic says its base in the body's data", () => {
  document.body.dataset.baseUrl = "/base";
  expect(findServer()).toEqual({ baseUrl: "/base/", token: "" });
});

test.each([
  ["there is no server of Jupyter's", undefined, "k"],
  ["the kernel's name is not known", { baseUrl: "/" }, ""],
  ["the configuration is no JSON", "{", "k"],
  ["the base is on another host", { baseUrl: "https://elsewhere.example/" }, "k"],
])("nothing is asked where %s", async (_, config, kernel) => {
  if (config !== undefined) configured(config);
  expect(await interruptKernel(kernel)).toBe("no server here");
  expect(fetched).not.toHaveBeenCalled();
});

test.each([403, 404, 500])("status %d is a refusal", async (status) => {
  configured({ baseUrl: "/" });
  fetched.mockResolvedValue(new Response(null, { status }));
  expect(await interruptKernel("k")).toBe("refused");
});

test("a server that cannot be reached is a refusal", async () => {
  configured({ baseUrl: "/" });
  fetched.mockRejectedValue(new TypeError("network"));
  expect(await interruptKernel("k")).toBe("refused");
});
