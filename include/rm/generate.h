/* generate.h -- extension "rm.generate/1": a device that runs the whole loop of a generation itself,
 * with a runtime of its own, instead of programs a token at a time.
 *
 * A device that has it says so with the property "generates" = "1"; "samples" names, separated by
 * spaces, what it can do besides greedy decoding (rm_generate_request.sampling). It runs in a process
 * of its own. One thread calls; generators and generations are backend-owned.
 */
#ifndef RM_GENERATE_H
#define RM_GENERATE_H
#include "rm/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RM_GENERATE_EXTENSION "rm.generate/1"

typedef struct rm_generator rm_generator;   /* a model, ready to generate */
typedef struct rm_generation rm_generation; /* a batch under way */

typedef struct { const int64_t* tokens; size_t count; } rm_prompt; /* never grows */

typedef struct rm_generate_request {
  size_t struct_size;
  const rm_prompt* prompts; /* the rows of one batch, without padding; each has a token at least */
  size_t num_prompts;
  uint64_t max_new_tokens;
  const int64_t* stop_tokens; /* a row ends with one of these: the host sees to it */
  size_t num_stop_tokens;
  /* None: greedy. Else fields of transformers' GenerationConfig that the device named in "samples",
   * as text: temperature, top_k, top_p, min_p, repetition_penalty. Applied in this order. */
  rm_options sampling;
  const uint64_t* seeds; /* one a row where it samples, else NULL */
} rm_generate_request;

typedef struct rm_generators {
  size_t struct_size;
  /* The model of a folder in the form transformers saves (config.json, *.safetensors), which is
   * gone when this returns. Options: the plugin's own by name, "cache_folder" (a folder it may keep
   * compiled programs in; empty: it may not). Fails with RM_UNIMPLEMENTED for another architecture. */
  rm_status* (*open)(size_t device, rm_str folder, rm_options options, rm_generator** out);
  /* The most tokens of a row, prompt included. */
  rm_status* (*max_tokens)(rm_generator*, uint64_t* out);
  void (*close)(rm_generator*); /* NULL is a no-op */
  /* The request and what it points to stay until finish. */
  rm_status* (*start)(rm_generator*, const rm_generate_request*, rm_generation** out);
  /* One token for every row, also for rows that have ended: anything there. `log_probabilities`
   * are NULL or a number a row: the model's of that token, or NaN where it is not known. */
  rm_status* (*step)(rm_generation*, int64_t* tokens, double* log_probabilities);
  void (*finish)(rm_generation*); /* at any time: nobody wants more; NULL is a no-op */
} rm_generators;

#if UINTPTR_MAX == UINT64_MAX
RM_FREEZE(rm_generate_request, 72);
RM_FREEZE(rm_generators, 56);
#endif

#ifdef __cplusplus
}
#endif
#endif /* RM_GENERATE_H */
