import { defineConfig } from "vite";

// Django serves dist/ at /static/. The template tag `frontend_assets` of the site finds the names of
// the built files in the manifest.
export default defineConfig({
  base: "/static/",
  publicDir: "public",
  build: {
    outDir: "dist",
    emptyOutDir: true,
    manifest: "manifest.json",
    assetsInlineLimit: 0, // the content security policy does not allow data: addresses
    rolldownOptions: { input: "src/main.ts" },
  },
});
