/**
 * Style sheets are bundled as text (`--loader:.css=text`) and inserted beside the elements they
 * style.
 */
declare module "*.css" {
  const text: string;
  export default text;
}
