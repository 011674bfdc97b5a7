// SPDX-License-Identifier: GPL-3.0-or-later
import react from '@vitejs/plugin-react';
import { defineConfig } from 'vite';

const prometheus = process.env.PROMETHEUS_URL || 'http://127.0.0.1:9090';
const proxy = { '/api/v1': prometheus };
const port = Number(process.env.PORT || 3000);

// @grafana/ui is ES modules that import some CommonJS packages. Bundled by Node's rules, the default import of these is the whole
// exports object; the components want what is in its "default".
const COMMONJS = new Set(['react-custom-scrollbars-2']);
const MARK = '\0default-of:';
const defaultOfCommonJs = {
  name: 'default-of-commonjs',
  enforce: 'pre',
  resolveId(id, importer) {
    return COMMONJS.has(id) && !importer?.startsWith(MARK) ? MARK + id : null;
  },
  load(id) {
    if (!id.startsWith(MARK)) return null;
    return `
      import * as all from '${id.slice(MARK.length)}';
      const found = all.default?.default ?? all.default;
      export default found;
      export const Scrollbars = all.Scrollbars ?? found;`;
  },
};

export default defineConfig({
  plugins: [react(), defaultOfCommonJs],
  define: { global: 'globalThis' },
  build: { chunkSizeWarningLimit: 20000 },
  server: { port, proxy, fs: { allow: ['..'] } },
  preview: { port, strictPort: true, proxy },
});
