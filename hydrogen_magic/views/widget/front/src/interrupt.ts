/** The result of asking the notebook's server to interrupt the kernel. */
export type Interrupted = "done" | "no server here" | "refused";

interface Server {
  /** Begins and ends with a slash. */
  baseUrl: string;
  token: string;
}

/** The server of this page; null in front ends without a Jupyter server (VS Code, Colab). */
export function findServer(): Server | null {
  const config = document.getElementById("jupyter-config-data")?.textContent;
  const classic = document.body.dataset.baseUrl;
  const { baseUrl, token } = config ? parseConfig(config) : { baseUrl: classic, token: "" };
  if (baseUrl === undefined) return null;
  return { baseUrl: baseUrl.endsWith("/") ? baseUrl : `${baseUrl}/`, token };
}

function parseConfig(text: string): { baseUrl: string | undefined; token: string } {
  try {
    const config = JSON.parse(text) as Record<string, unknown>;
    const word = (name: string) => (typeof config[name] === "string" ? config[name] : undefined);
    return { baseUrl: word("baseUrl"), token: word("token") ?? "" };
  } catch {
    return { baseUrl: undefined, token: "" };
  }
}

/**
 * Does the same as the stop button in the notebook's toolbar; requests stay within this page's
 * origin.
 */
export async function interruptKernel(kernelId: string): Promise<Interrupted> {
  const server = findServer();
  if (server === null || kernelId === "") return "no server here";
  const path = `${server.baseUrl}api/kernels/${encodeURIComponent(kernelId)}/interrupt`;
  const url = new URL(path, location.href);
  if (url.origin !== location.origin) return "no server here";
  const xsrf = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie)?.[1] ?? "";
  const headers: Record<string, string> = { "X-XSRFToken": xsrf };
  if (server.token) headers.Authorization = `token ${server.token}`;
  try {
    const answer = await fetch(url.href, { method: "POST", headers, credentials: "same-origin" });
    return answer.ok ? "done" : "refused";
  } catch {
    return "refused";
  }
}
