import { defineConfig } from "vitest/config";

/** Tests that need a page, which takes a while to set up for every file; all others share a thread. */
const PAGE = ["test/*_view.test.tsx", "test/{header,input,interrupt,keys,sections,view}.test.ts"];

export default defineConfig({
  test: {
    pool: "threads",
    // Of a machine that is busy with other tests.
    testTimeout: 60_000,
    projects: [
      { extends: true, test: { name: "page", environment: "happy-dom", include: PAGE } },
      {
        extends: true,
        test: { name: "pure", isolate: false, include: ["test/**/*.test.ts"], exclude: PAGE },
      },
    ],
  },
});
