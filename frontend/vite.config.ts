import { defineConfig } from "vite";

// Django serves dist/ at /static/; the template tag in coordinator/web resolves names through the manifest.
export default defineConfig({
  base: "/static/",
  publicDir: "public",
  build: {
    outDir: "dist",
    emptyOutDir: true,
    manifest: "manifest.json",
    assetsInlineLimit: 0, // no data: addresses, so that the content security policy can stay strict
    rolldownOptions: { input: "src/main.ts" },
  },
});
